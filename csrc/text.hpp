// Messages for errors: the rule, the actual values, what to do next.
#pragma once

#include <sstream>
#include <string>

namespace deadpool {

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace deadpool
