#pragma once

#include <chrono>
#include <cmath>
#include <stdexcept>

#include "text.hpp"

namespace deadpool {

using Clock = std::chrono::steady_clock;

// timeout_s from now. Infinity means for good; it is cut to a span that the clock's arithmetic can hold.
inline Clock::time_point deadline_after(double timeout_s) {
  if (std::isnan(timeout_s) || timeout_s < 0)
    throw std::invalid_argument(
        text("timeout_s must be 0 or more, got ", timeout_s, ". Pass float('inf') to wait for good."));
  constexpr double longest_s = 1e9;
  return Clock::now() +
         std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::fmin(timeout_s, longest_s)));
}

}  // namespace deadpool
