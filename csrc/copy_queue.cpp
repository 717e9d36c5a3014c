#include "copy_queue.hpp"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <deque>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

#include "deadline.hpp"
#include "memory.hpp"
#include "text.hpp"

namespace deadpool {
namespace {

// A copy reports its progress this often: about once a millisecond at memory speed.
constexpr std::uint64_t kProgressStep = std::uint64_t{8} << 20;

constexpr double kDestructorPatience_s = 30;

// Signals are Python's main thread's business. A thread inherits its mask from the one that starts it.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

std::shared_ptr<void> MemoryBackend::order_after(std::optional<std::uint64_t> stream) {
  if (stream)
    throw std::invalid_argument(text("stream is for queues of a CUDA device; this one copies host memory, got stream=",
                                     *stream, ". Leave stream out, or make the queue with CopyQueue(device)."));
  return nullptr;
}

void MemoryBackend::run(const CopyJob& job, std::atomic<std::uint64_t>& bytes_copied) {
  std::uint64_t unsaid = 0;  // bytes in place that the progress word does not tell of
  for (std::size_t i = 0; i < job.lengths.size(); ++i) {
    const auto* source = reinterpret_cast<const unsigned char*>(job.sources[i]);
    auto* destination = reinterpret_cast<unsigned char*>(job.destinations[i]);
    for (std::uint64_t done = 0; done < job.lengths[i];) {
      const std::uint64_t step = std::min(kProgressStep, job.lengths[i] - done);
      copy_past_caches(destination + done, source + done, step);
      bytes_copied.fetch_add(step, std::memory_order_relaxed);
      done += step;
      unsaid += step;
      const bool last = i + 1 == job.lengths.size() && done == job.lengths[i];
      if (job.progress != nullptr && (unsaid >= kProgressStep || last)) {
        store_u64(job.progress, job.destinations[i] + done - job.progress_base);
        unsaid = 0;
      }
    }
  }
  store_u64(job.flag, job.flag_value);
}

struct CopyQueue::State {
  explicit State(std::unique_ptr<CopyBackend> b) : backend(std::move(b)) {}

  const std::unique_ptr<CopyBackend> backend;
  const pid_t process = getpid();
  std::atomic<std::uint64_t> bytes_copied{0};
  std::thread thread;
  std::mutex join_mutex;  // of `thread`

  std::mutex mutex;  // of all below
  std::condition_variable changed;
  std::deque<CopyJob> waiting;
  std::uint64_t submitted = 0, done = 0;  // tickets; jobs are done in order, so one number says which
  bool running = false, started = false, closing = false, ended = false;
  std::string failure;             // empty: none. Once set, nothing more is copied
  std::exception_ptr start_error;  // from the backend's start
};

CopyQueue::CopyQueue(std::unique_ptr<CopyBackend> backend) : state_(std::make_shared<State>(std::move(backend))) {
  {
    const SignalsBlocked blocked;
    state_->thread = std::thread([state = state_] { work(state); });
  }
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [&] { return state_->started || state_->ended; });
  if (!state_->start_error) return;
  lock.unlock();
  state_->thread.join();
  std::rethrow_exception(state_->start_error);
}

CopyQueue::~CopyQueue() {
  if (in_forked_child()) {
    // A forked child (a data loader's worker) has our memory but not our thread: locks may be held by nobody. Let go of
    // nothing; the child's exit frees it.
    new std::shared_ptr<State>(std::move(state_));
    return;
  }
  if (close(kDestructorPatience_s)) return;
  std::fprintf(
      stderr,
      "deadpool: a copy queue was destroyed while its job did not end for %.0f s (a device that hangs?); its thread is "
      "left behind\n",
      kDestructorPatience_s);
  const std::lock_guard lock(state_->join_mutex);
  if (state_->thread.joinable()) state_->thread.detach();
}

void CopyQueue::work(const std::shared_ptr<State>& state) {
  State& s = *state;
  pthread_setname_np(pthread_self(), "deadpool-copy");
  std::exception_ptr start_error;
  try {
    s.backend->start();
  } catch (...) {
    start_error = std::current_exception();
  }
  std::unique_lock lock(s.mutex);
  s.start_error = start_error;
  s.started = true;
  s.changed.notify_all();
  while (!start_error) {
    s.changed.wait(lock, [&] { return s.closing || !s.waiting.empty(); });
    if (s.closing) break;
    std::string failure;
    {
      const CopyJob job = std::move(s.waiting.front());
      s.waiting.pop_front();
      s.running = true;
      lock.unlock();
      try {
        s.backend->run(job, s.bytes_copied);
      } catch (const std::exception& error) {
        failure = error.what();
      }
    }  // the job is gone before anyone hears that it is done
    lock.lock();
    s.running = false;
    if (failure.empty()) {
      ++s.done;
    } else {
      s.failure = text("copy job ", s.done + 1, " failed: ", failure,
                       " Its flag was not set, and this queue copies nothing more: close it and make a new one.");
      s.waiting.clear();
    }
    s.changed.notify_all();
    if (!s.failure.empty()) break;
  }
  lock.unlock();
  s.backend->stop();
  lock.lock();
  s.ended = true;
  s.changed.notify_all();
}

bool CopyQueue::in_forked_child() const { return getpid() != state_->process; }

void CopyQueue::check_process() const {
  if (in_forked_child())
    throw std::runtime_error(text("a copy queue works only in the process that made it (", state_->process,
                                  "), this is ", getpid(), ", forked from it. Make a queue of its own here."));
}

std::uint64_t CopyQueue::submit(const std::uint64_t* sources, const std::uint64_t* destinations,
                                const std::uint64_t* lengths, std::size_t count, std::uint64_t flag_address,
                                std::uint64_t flag_value, std::optional<std::uint64_t> stream,
                                std::uint64_t progress_address) {
  check_process();
  CopyJob job{{}, {}, {}, shared_word(flag_address, "flag_address"), flag_value, nullptr, 0, nullptr};
  if (progress_address != 0) job.progress = shared_word(progress_address, "progress_address");
  if (count != 0) job.progress_base = destinations[0];
  job.sources.reserve(count);
  job.destinations.reserve(count);
  job.lengths.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    try {
      check_copy(sources[i], destinations[i], lengths[i]);
    } catch (const std::invalid_argument& error) {
      throw std::invalid_argument(text("entry ", i, " of ", count, ": ", error.what()));
    }
    if (job.progress != nullptr && i > 0 && destinations[i] < destinations[i - 1] + lengths[i - 1])
      throw std::invalid_argument(
          text("entry ", i, " of ", count, ": with a progress_address destinations must ascend without overlap, got 0x",
               std::hex, destinations[i], " after 0x", destinations[i - 1], " + ", std::dec, lengths[i - 1],
               " bytes. Submit the entries in the order of their layout."));
    if (lengths[i] == 0) continue;
    job.sources.push_back(sources[i]);
    job.destinations.push_back(destinations[i]);
    job.lengths.push_back(lengths[i]);
  }
  job.after = state_->backend->order_after(stream);

  std::unique_lock lock(state_->mutex);
  if (!state_->failure.empty()) throw std::runtime_error(state_->failure);
  if (state_->closing) throw std::runtime_error("submit on a closed copy queue. Make a new one.");
  state_->waiting.push_back(std::move(job));
  const std::uint64_t ticket = ++state_->submitted;
  lock.unlock();  // before waking the thread, which would only wait for the lock
  state_->changed.notify_all();
  return ticket;
}

bool CopyQueue::wait(std::uint64_t ticket, double timeout_s) {
  check_process();
  const auto deadline = deadline_after(timeout_s);
  State& s = *state_;
  std::unique_lock lock(s.mutex);
  if (ticket == 0 || ticket > s.submitted)
    throw std::invalid_argument(
        text("ticket must be one that submit() of this queue returned (1 to ", s.submitted, "), got ", ticket, "."));
  const auto dropped = [&] { return s.closing && ticket > s.done + (s.running ? 1 : 0); };
  s.changed.wait_until(lock, deadline, [&] { return s.done >= ticket || !s.failure.empty() || dropped(); });
  if (s.done >= ticket) return true;
  if (!s.failure.empty()) throw std::runtime_error(s.failure);
  if (dropped())
    throw std::runtime_error(
        text("copy job ", ticket,
             " was dropped: the queue was closed before it began, nothing of it was "
             "copied and its flag is unchanged. Wait for a ticket before closing if its copy is needed."));
  return false;
}

std::uint64_t CopyQueue::pending() const {
  check_process();
  const std::lock_guard lock(state_->mutex);
  return state_->waiting.size() + (state_->running ? 1 : 0);
}

std::uint64_t CopyQueue::bytes_copied() const {
  check_process();
  return state_->bytes_copied.load(std::memory_order_relaxed);
}

bool CopyQueue::close(double timeout_s) {
  check_process();
  const auto deadline = deadline_after(timeout_s);
  State& s = *state_;
  {
    std::unique_lock lock(s.mutex);
    s.closing = true;
    s.waiting.clear();
    s.changed.notify_all();
    if (!s.changed.wait_until(lock, deadline, [&] { return s.ended; })) return false;
  }
  const std::lock_guard lock(s.join_mutex);
  if (s.thread.joinable()) s.thread.join();
  return true;
}

}  // namespace deadpool
