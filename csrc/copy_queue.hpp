// A queue of copy jobs and the one thread that works them off, in order.
//
// The training thread submits the addresses of all tensors of a snapshot and goes on at once. The queue's thread copies
// them and then stores a value to a flag in shared memory, where the agent sees it. Neither needs Python.
//
// How bytes move is the backend's: plain memory here, CUDA in cuda_copy.cpp.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace deadpool {

struct CopyJob {
  std::vector<std::uint64_t> sources, destinations, lengths;  // as many of each; entries of length 0 already left out
  std::uint64_t* flag;
  std::uint64_t flag_value;
  std::uint64_t* progress;      // null: nobody asks. Else destinations ascend, and the word says how far they are whole
  std::uint64_t progress_base;  // the address that the word counts from
  std::shared_ptr<void> after;  // what the backend noted at submit about the work that must come first
};

class CopyBackend {
 public:
  virtual ~CopyBackend() = default;

  // On the queue's thread, before the first job and after the last one.
  virtual void start() {}
  virtual void stop() noexcept {}

  // On the submitting thread; must not block. `stream` is what the copies have to follow.
  virtual std::shared_ptr<void> order_after(std::optional<std::uint64_t> stream) = 0;

  // On the queue's thread: copies all entries, then stores the flag (release). Adds to bytes_copied as it goes, and
  // keeps the job's progress word. Throws if a copy failed, and then has not stored the flag.
  virtual void run(const CopyJob& job, std::atomic<std::uint64_t>& bytes_copied) = 0;
};

class MemoryBackend : public CopyBackend {
 public:
  std::shared_ptr<void> order_after(std::optional<std::uint64_t> stream) override;
  void run(const CopyJob& job, std::atomic<std::uint64_t>& bytes_copied) override;
};

class CopyQueue {
 public:
  // Returns once the backend has started; throws what its start threw.
  explicit CopyQueue(std::unique_ptr<CopyBackend> backend);
  // Closes. A job that is still stuck after half a minute (a device that hangs) is left to its thread, with a line on
  // stderr.
  ~CopyQueue();
  CopyQueue(const CopyQueue&) = delete;
  CopyQueue& operator=(const CopyQueue&) = delete;

  // Takes its own copy of the arrays. Returns a ticket: 1, 2, 3, …
  //
  // With a progress_address the destinations must ascend without overlap. While the job runs, the word there is
  // overwritten (release) with ever larger numbers p: every byte of an entry that lies below destinations[0] + p is in
  // place. Gaps between entries count. The last p is the end of the last entry; the word is not touched before the
  // first bytes are in place, so whoever submits sets it to 0.
  std::uint64_t submit(const std::uint64_t* sources, const std::uint64_t* destinations, const std::uint64_t* lengths,
                       std::size_t count, std::uint64_t flag_address, std::uint64_t flag_value,
                       std::optional<std::uint64_t> stream = std::nullopt, std::uint64_t progress_address = 0);

  // True once the ticket's job is done, false when timeout_s passed first. Throws runtime_error if it failed or was
  // dropped. After a failure the queue copies nothing more: every later ticket fails with the same error.
  bool wait(std::uint64_t ticket, double timeout_s);

  // Jobs not yet done, the running one included.
  std::uint64_t pending() const;
  std::uint64_t bytes_copied() const;

  // Takes no more jobs, drops those not begun (their wait() throws), and waits for the one that runs. True once the
  // thread has ended, false when timeout_s passed first; call it again then. Closing twice is fine.
  bool close(double timeout_s);

  // True in a process forked from the one that made the queue. There every call but this and the destructor throws.
  bool in_forked_child() const;

 private:
  struct State;
  static void work(const std::shared_ptr<State>& state);
  void check_process() const;

  std::shared_ptr<State> state_;  // shared with the thread, which may outlive the queue (see the destructor)
};

}  // namespace deadpool
