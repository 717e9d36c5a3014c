// The engine's core without Python, for the sanitizers: tests/unit/test_engine_native.py builds and runs this with the
// address and undefined-behaviour sanitizers, with the thread sanitizer, and for AArch64.

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../copy_queue.hpp"
#include "../crc32c.hpp"
#include "../memory.hpp"
#include "../rendezvous.hpp"
#include "../socket_io.hpp"
#include "../text.hpp"
#include "check.hpp"

using namespace deadpool;

namespace {

std::uint64_t address(const void* pointer) { return reinterpret_cast<std::uint64_t>(pointer); }

constexpr double kPatience_s = 20;

struct Random {  // splitmix64; the seed is printed by main
  std::uint64_t state;
  std::uint64_t next() {
    std::uint64_t z = (state += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  std::uint64_t below(std::uint64_t bound) { return next() % bound; }
};

struct Snapshot {  // tensors of random sizes, some empty, and a slot for them
  std::vector<std::vector<unsigned char>> tensors;
  std::vector<unsigned char> slot;
  std::vector<std::uint64_t> sources, destinations, lengths;

  Snapshot(Random& random, std::size_t count, std::size_t longest) {
    std::size_t total = 0;
    for (std::size_t i = 0; i < count; ++i) {
      tensors.emplace_back(random.below(4) == 0 ? 0 : random.below(longest));
      for (auto& byte : tensors.back()) byte = static_cast<unsigned char>(random.next());
      total += tensors.back().size();
    }
    slot.resize(total);
    std::size_t offset = 0;
    for (const auto& tensor : tensors) {
      sources.push_back(address(tensor.data()));
      destinations.push_back(address(slot.data() + offset));
      lengths.push_back(tensor.size());
      offset += tensor.size();
    }
  }

  std::uint64_t submit(CopyQueue& queue, const std::uint64_t* flag, std::uint64_t value) const {
    return queue.submit(sources.data(), destinations.data(), lengths.data(), lengths.size(), address(flag), value);
  }

  bool arrived() const {
    std::vector<unsigned char> expected;
    for (const auto& tensor : tensors) expected.insert(expected.end(), tensor.begin(), tensor.end());
    return expected == slot;
  }
};

// Copies nothing until it is let; fails where it is told to.
class ScriptedBackend : public CopyBackend {
 public:
  explicit ScriptedBackend(std::atomic<bool>& gate, std::uint64_t failing_value = 0, std::atomic<int>* begun = nullptr)
      : gate_(gate), failing_value_(failing_value), begun_(begun) {}
  std::shared_ptr<void> order_after(std::optional<std::uint64_t>) override { return nullptr; }
  void run(const CopyJob& job, std::atomic<std::uint64_t>&) override {
    if (begun_ != nullptr) ++*begun_;
    while (!gate_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (job.flag_value == failing_value_) throw std::runtime_error("scripted failure.");
    store_u64(job.flag, job.flag_value);
  }

 private:
  std::atomic<bool>& gate_;
  const std::uint64_t failing_value_;
  std::atomic<int>* const begun_;
};

class BackendThatCannotStart : public ScriptedBackend {
 public:
  using ScriptedBackend::ScriptedBackend;
  void start() override { throw std::runtime_error("no such device"); }
};

void test_copies_are_in_order_and_whole_when_the_flag_is_seen(Random& random) {
  CopyQueue queue(std::make_unique<MemoryBackend>());
  alignas(8) std::uint64_t flag = 0;
  std::vector<std::unique_ptr<Snapshot>> snapshots;
  std::uint64_t total = 0;
  for (int i = 0; i < 20; ++i) {
    snapshots.push_back(std::make_unique<Snapshot>(random, random.below(60), 20000));
    total += snapshots.back()->slot.size();
  }
  // The agent's side: it reads what was copied as soon as it sees the flag, with no other synchronization.
  std::atomic<int> wrong{0};
  std::thread agent([&] {
    for (std::uint64_t i = 0; i < snapshots.size(); ++i) {
      if (wait_u64_at_least(&flag, i + 1, kPatience_s) != WaitResult::reached || !snapshots[i]->arrived()) ++wrong;
    }
  });
  for (std::uint64_t i = 0; i < snapshots.size(); ++i) CHECK(snapshots[i]->submit(queue, &flag, i + 1) == i + 1);
  CHECK(queue.wait(snapshots.size(), kPatience_s));
  agent.join();
  CHECK(wrong == 0);
  CHECK(queue.bytes_copied() == total);
  CHECK(queue.pending() == 0);
}

void test_the_flag_comes_last() {
  const std::vector<unsigned char> source(std::size_t{12} << 20, 7);  // long enough to look while it is copied
  std::vector<unsigned char> slot(source.size());
  const std::uint64_t from = address(source.data()), to = address(slot.data()), length = source.size();
  std::uint64_t flag = 0;
  CopyQueue queue(std::make_unique<MemoryBackend>());
  queue.submit(&from, &to, &length, 1, address(&flag), 1);
  while (load_u64(&flag) == 0) continue;
  CHECK(queue.bytes_copied() == length);
  CHECK(slot == source);
  CHECK(queue.wait(1, kPatience_s));
}

void test_progress_is_a_whole_prefix() {
  const std::vector<unsigned char> source(std::size_t{40} << 20, 7);
  std::vector<unsigned char> slot(source.size() + 1000);
  const std::uint64_t first = 100, second = source.size() - first, gap = 500;
  const std::uint64_t sources[] = {address(source.data()), address(source.data()), address(source.data() + first)};
  const std::uint64_t targets[] = {address(slot.data()), address(slot.data()), address(slot.data() + first + gap)};
  const std::uint64_t lengths[] = {0, first, second};
  std::uint64_t flag = 0, progress = 0;
  CopyQueue queue(std::make_unique<MemoryBackend>());
  queue.submit(sources, targets, lengths, 3, address(&flag), 1, std::nullopt, address(&progress));
  std::uint64_t seen = 0;
  int steps = 0;
  while (seen < first + gap + second) {
    const std::uint64_t now = load_u64(&progress);
    CHECK(now >= seen);
    if (now == seen) continue;
    ++steps;
    for (std::uint64_t i = seen; i < now; i += 997) CHECK((i >= first && i < first + gap) || slot[i] == 7);
    CHECK(slot[now - 1] == 7);
    seen = now;
  }
  CHECK(steps >= 1);
  CHECK(queue.wait(1, kPatience_s) && load_u64(&flag) == 1);
  const std::uint64_t falling[] = {targets[2], targets[1]}, two[] = {10, 10}, from[] = {sources[1], sources[1]};
  CHECK_THROWS(std::invalid_argument, "must ascend",
               queue.submit(from, falling, two, 2, address(&flag), 2, std::nullopt, address(&progress)));
  CHECK_THROWS(std::invalid_argument, "progress_address must be a multiple of 8",
               queue.submit(from, targets, two, 1, address(&flag), 2, std::nullopt, address(&progress) + 4));
}

void test_sockets_move_whole_amounts(Random& random, bool blocking) {
  int fds[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
  if (!blocking)
    for (const int fd : fds) CHECK(fcntl(fd, F_SETFL, O_NONBLOCK) == 0);
  std::vector<unsigned char> data(3000001), arrived(data.size());
  for (auto& byte : data) byte = static_cast<unsigned char>(random.next());
  const std::uint32_t expected = crc32c(data.data(), data.size());
  char head[5] = {};
  std::thread sender([&] {
    CHECK(send_summed(fds[0], "head1", 5, address(data.data()), data.size()) == expected);
    send_all(fds[0], "head2", 5, address(data.data()), data.size());
    CHECK(send_summed(fds[0], "head3", 5, 0, 0) == 0);
  });
  for (const char number : {'1', '2'}) {
    recv_all(fds[1], address(head), 5);
    CHECK(head[4] == number);
    std::fill(arrived.begin(), arrived.end(), 0);
    CHECK(recv_all(fds[1], address(arrived.data()), arrived.size()) == expected);
    CHECK(arrived == data);
  }
  recv_all(fds[1], address(head), 5);
  CHECK(head[4] == '3');
  sender.join();
  // Shutting down ends a call that waits, on either side.
  std::thread stuck([&] {
    CHECK_THROWS(SocketError, "closed the connection after 0 of 5 bytes", recv_all(fds[1], address(head), 5));
  });
  std::thread full([&] {
    try {
      for (;;) send_all(fds[1], "", 0, address(data.data()), data.size());
    } catch (const SocketError& error) {
      CHECK(error.number() == EPIPE || error.number() == ECONNRESET);
    }
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  shutdown(fds[1], SHUT_RDWR);
  stuck.join();
  full.join();
  CHECK_THROWS(std::invalid_argument, "null", send_all(fds[0], "", 0, 0, 1));
  for (const int fd : fds) close(fd);
}

void test_many_threads_submit_and_wait(Random& random) {
  CopyQueue queue(std::make_unique<MemoryBackend>());
  std::vector<std::unique_ptr<Snapshot>> snapshots;
  for (int i = 0; i < 4; ++i) snapshots.push_back(std::make_unique<Snapshot>(random, 10, 1000));
  std::vector<std::uint64_t> flags(snapshots.size(), 0);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < snapshots.size(); ++t)
    threads.emplace_back([&, t] {
      for (std::uint64_t i = 1; i <= 50; ++i) {
        const auto ticket = snapshots[t]->submit(queue, &flags[t], i);
        if (!queue.wait(ticket, kPatience_s) || load_u64(&flags[t]) != i || !snapshots[t]->arrived()) ++wrong;
      }
    });
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
}

void test_close_finishes_the_running_job_and_drops_the_others(Random& random) {
  std::atomic<bool> gate{false};
  std::atomic<int> begun{0};
  CopyQueue queue(std::make_unique<ScriptedBackend>(gate, 0, &begun));
  const Snapshot snapshot(random, 3, 100);
  std::uint64_t flags[3] = {0, 0, 0};
  for (int i = 0; i < 3; ++i) snapshot.submit(queue, &flags[i], 7);
  while (begun == 0) std::this_thread::yield();
  CHECK(queue.pending() == 3);
  std::thread waiter([&] { CHECK_THROWS(std::runtime_error, "was dropped", queue.wait(3, kPatience_s)); });
  CHECK(!queue.close(0.01));
  CHECK(!queue.wait(1, 0.01));
  CHECK_THROWS(std::runtime_error, "closed", snapshot.submit(queue, &flags[0], 8));
  gate = true;
  CHECK(queue.close(kPatience_s));
  CHECK(queue.close(0));
  waiter.join();
  CHECK(queue.wait(1, 0));
  CHECK_THROWS(std::runtime_error, "was dropped", queue.wait(2, 0));
  CHECK(flags[0] == 7 && flags[1] == 0 && flags[2] == 0);
}

void test_a_failed_copy_fails_its_ticket_and_all_later_ones(Random& random) {
  std::atomic<bool> gate{true};
  CopyQueue queue(std::make_unique<ScriptedBackend>(gate, 2));
  const Snapshot snapshot(random, 3, 100);
  std::uint64_t flag = 0;
  const auto good = snapshot.submit(queue, &flag, 1);
  CHECK(queue.wait(good, kPatience_s));
  gate = false;
  const auto bad = snapshot.submit(queue, &flag, 2);
  const auto after = snapshot.submit(queue, &flag, 3);
  gate = true;
  CHECK_THROWS(std::runtime_error, "copy job 2 failed: scripted failure.", queue.wait(bad, kPatience_s));
  CHECK_THROWS(std::runtime_error, "copy job 2 failed", queue.wait(after, kPatience_s));
  CHECK_THROWS(std::runtime_error, "copy job 2 failed", snapshot.submit(queue, &flag, 4));
  CHECK(queue.wait(good, 0));
  CHECK(load_u64(&flag) == 1);
  CHECK(queue.pending() == 0);
  CHECK(queue.close(kPatience_s));
}

void test_bad_arguments_are_refused(Random& random) {
  CopyQueue queue(std::make_unique<MemoryBackend>());
  Snapshot snapshot(random, 4, 100);
  std::uint64_t flags[2] = {0, 0};
  const auto refuse = [&](const char* says, std::uint64_t source, std::uint64_t target, std::uint64_t length,
                          std::uint64_t flag, std::optional<std::uint64_t> stream = std::nullopt) {
    CHECK_THROWS(std::invalid_argument, says, queue.submit(&source, &target, &length, 1, flag, 1, stream));
  };
  const std::uint64_t a = address(snapshot.slot.data()), flag = address(flags);
  refuse("flag_address is null", a, a + 8, 8, 0);
  refuse("multiple of 8", a, a + 8, 8, flag + 4);
  refuse("source is null", 0, a, 8, flag);
  refuse("entry 0 of 1: destination is null", a, 0, 8, flag);
  refuse("overlap", a, a + 7, 8, flag);
  refuse("end of the address space", a, 1000, ~std::uint64_t{0} - 100, flag);
  refuse("stream", a, a + 8, 8, flag, 0);
  CHECK_THROWS(std::invalid_argument, "ticket", queue.wait(0, 0));
  CHECK_THROWS(std::invalid_argument, "ticket", queue.wait(1, 0));
  CHECK_THROWS(std::invalid_argument, "timeout_s", queue.wait(1, -1));
  CHECK_THROWS(std::invalid_argument, "timeout_s", queue.wait(1, std::nan("")));
  CHECK(flags[0] == 0 && flags[1] == 0);

  std::atomic<bool> gate{true};
  CHECK_THROWS(std::runtime_error, "no such device", CopyQueue(std::make_unique<BackendThatCannotStart>(gate)));
}

void test_destroying_a_busy_queue_leaves_the_running_job_whole(Random& random) {
  const Snapshot snapshot(random, 50, 50000);
  std::uint64_t flag = 0;
  {
    CopyQueue queue(std::make_unique<MemoryBackend>());
    snapshot.submit(queue, &flag, 1);
    while (queue.bytes_copied() == 0) std::this_thread::yield();
  }
  CHECK(flag == 1);
  CHECK(snapshot.arrived());
}

void test_waits_on_words() {
  std::uint64_t word = 5, stop = 0;
  const double forever_s = std::numeric_limits<double>::infinity();
  CHECK(wait_u64_at_least(&word, 5, 0) == WaitResult::reached);
  CHECK(wait_u64_at_least(&word, 6, 0.01) == WaitResult::timed_out);
  CHECK(wait_u64_at_least(&word, 5, 0, &stop, 0) == WaitResult::reached);
  CHECK(wait_u64_at_least(&word, 6, 0, &stop, 0) == WaitResult::stopped);
  std::thread other([&] {
    for (int i = 0; i < 10; ++i) add_u64(&word, 1);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    store_u64(&stop, 1);
  });
  CHECK(wait_u64_at_least(&word, 15, forever_s, &stop, 1) == WaitResult::reached);
  CHECK(wait_u64_at_least(&word, 16, forever_s, &stop, 1) == WaitResult::stopped);
  other.join();
  CHECK(add_u64(&word, ~std::uint64_t{0}) == 14);
}

void test_checksum(Random& random) {
  CHECK(crc32c("123456789", 9) == 0xE3069283u);
  CHECK(crc32c_portable("123456789", 9) == 0xE3069283u);
  CHECK(crc32c(nullptr, 0) == 0);
  for (int round = 0; round < 300; ++round) {
    // Exactly as long as the data, so that the address sanitizer sees a read past the end.
    const std::size_t length = random.below(round % 3 == 0 ? 40000 : 900),
                      skip = std::min<std::size_t>(random.below(16), length);
    std::vector<unsigned char> data(length);
    for (auto& byte : data) byte = static_cast<unsigned char>(random.next());
    const auto seed = static_cast<std::uint32_t>(random.next());
    const std::uint32_t whole = crc32c_portable(data.data() + skip, length - skip, seed);
    CHECK(crc32c(data.data() + skip, length - skip, seed) == whole);
    const std::size_t cut = skip + random.below(length - skip + 1);
    const std::uint32_t first = crc32c(data.data() + skip, cut - skip, seed);
    CHECK(crc32c(data.data() + cut, length - cut, first) == whole);
    CHECK(crc32c_combine(first, crc32c(data.data() + cut, length - cut), length - cut) == whole);
  }
}

void test_prefault_keeps_contents() {
  std::vector<unsigned char> data(100000, 42);
  prefault(address(data.data()) + 3, data.size() - 3);
  for (const auto byte : data) CHECK(byte == 42);
  prefault(0, 0);
  CHECK_THROWS(std::invalid_argument, "null", prefault(0, 1));
}

class RendezvousClient {
 public:
  RendezvousClient(const RendezvousServer& server, const std::string& secret) : fd_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in where{};
    where.sin_family = AF_INET;
    where.sin_port = htons(server.port());
    where.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    CHECK(connect(fd_, reinterpret_cast<sockaddr*>(&where), sizeof where) == 0);
    send_frame({secret});
  }
  ~RendezvousClient() { close(fd_); }

  void send_frame(const std::vector<std::string>& words) {
    std::string body;
    for (const std::string& word : words) body += length_of(word) + word;
    send_raw(length_of(body) + body);
  }
  void send_raw(const std::string& bytes) { (void)!send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL); }
  // The words of the answer; one word "closed" where the connection is over.
  std::vector<std::string> answer() {
    std::uint32_t length = 0;
    if (recv(fd_, &length, sizeof length, MSG_WAITALL) != sizeof length) return {"closed"};
    std::string body(length, 0);
    if (length != 0 && recv(fd_, body.data(), length, MSG_WAITALL) != static_cast<ssize_t>(length)) return {"closed"};
    std::vector<std::string> words;
    for (std::size_t at = 0; at < body.size(); at += words.back().size() + sizeof length) {
      std::memcpy(&length, body.data() + at, sizeof length);
      words.push_back(body.substr(at + sizeof length, length));
    }
    return words;
  }
  std::vector<std::string> ask(const std::vector<std::string>& words) {
    send_frame(words);
    return answer();
  }

 private:
  static std::string length_of(const std::string& bytes) {  // both machines that this runs on are little-endian
    const auto length = static_cast<std::uint32_t>(bytes.size());
    return {reinterpret_cast<const char*>(&length), sizeof length};
  }
  const int fd_;
};

using Words = std::vector<std::string>;

void test_a_rendezvous_brings_many_clients_together() {
  constexpr int clients = 24;
  const RendezvousServer server("127.0.0.1", "secret");
  std::vector<std::thread> threads;
  for (int i = 0; i < clients; ++i)
    threads.emplace_back([&server, i] {
      RendezvousClient me(server, "secret");
      CHECK(me.ask({"S", text("at", i), std::string(100000, static_cast<char>('a' + i)), text("n", i), ""}) == Words{});
      Words question{"G"};
      for (int j = 0; j < clients; ++j) question.push_back(text("at", j));
      const Words found = me.ask(question);
      CHECK(found.size() == clients);
      for (int j = 0; j < clients; ++j) CHECK(found[j] == std::string(100000, static_cast<char>('a' + j)));
      CHECK(me.ask({"A", "count", "1"}).size() == 1);
    });
  for (auto& thread : threads) thread.join();
  RendezvousClient me(server, "secret");
  CHECK(me.ask({"G", "count"}) == Words{"24"});
  CHECK(me.ask({"N"}) == Words{"49"});
}

void test_who_breaks_a_rule_of_the_rendezvous_is_sent_away() {
  const RendezvousServer server("127.0.0.1", "secret");
  RendezvousClient waiting(server, "secret"), other(server, "secret");
  waiting.send_frame({"W", "one", "two"});
  CHECK((other.ask({"S", "one", "1"}) == Words{}));
  CHECK((other.ask({"D", "one"}) == Words{"1"}));  // two is not enough then
  CHECK((other.ask({"S", "two", "2"}) == Words{}));
  CHECK((other.ask({"C", "one", "two"}) == Words{"0"}));
  for (const Words& bad : {Words{}, Words{"?"}, Words{"S", "odd"}, Words{"A", "two", "many"}, Words{"A", "two", ""},
                           Words{"X", "two"}, Words{"N", "two"}}) {
    RendezvousClient client(server, "secret");
    CHECK(client.ask(bad) == Words{"closed"});
  }
  CHECK(RendezvousClient(server, "secreT").ask({"N"}) == Words{"closed"});
  CHECK(RendezvousClient(server, "").ask({"N"}) == Words{"closed"});
  for (const std::string& raw : {std::string("\xff\xff\xff\xff", 4), std::string("\5\0\0\0\7\0\0\0x", 9)}) {
    RendezvousClient client(server, "secret");
    client.send_raw(raw);
    CHECK(client.answer() == Words{"closed"});
  }
  { RendezvousClient gone(server, "secret"), half(server, "secret");
    gone.send_frame({"G", "one"});
    half.send_raw(std::string("\7\0", 2)); }
  CHECK((other.ask({"S", "one", "1"}) == Words{}));
  CHECK(waiting.answer() == Words{});
  CHECK_THROWS(std::runtime_error, "numeric", RendezvousServer("localhost.invalid", ""));
  CHECK_THROWS(std::runtime_error, "192.0.2.1", RendezvousServer("192.0.2.1", ""));
}

void test_the_end_of_a_rendezvous_is_seen_by_who_waits() {
  auto server = std::make_unique<RendezvousServer>("127.0.0.1", "secret");
  RendezvousClient waiting(*server, "secret");
  waiting.send_frame({"G", "never"});
  server.reset();
  CHECK(waiting.answer() == Words{"closed"});
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t seed = argc > 1 ? std::strtoull(argv[1], nullptr, 0) : 1;
  std::printf("checksum: %s, seed %llu\n", crc32c_implementation(), static_cast<unsigned long long>(seed));
  Random random{seed};
  test_copies_are_in_order_and_whole_when_the_flag_is_seen(random);
  test_the_flag_comes_last();
  test_progress_is_a_whole_prefix();
  test_sockets_move_whole_amounts(random, true);
  test_sockets_move_whole_amounts(random, false);
  test_many_threads_submit_and_wait(random);
  test_close_finishes_the_running_job_and_drops_the_others(random);
  test_a_failed_copy_fails_its_ticket_and_all_later_ones(random);
  test_bad_arguments_are_refused(random);
  test_destroying_a_busy_queue_leaves_the_running_job_whole(random);
  test_waits_on_words();
  test_checksum(random);
  test_prefault_keeps_contents();
  test_a_rendezvous_brings_many_clients_together();
  test_who_breaks_a_rule_of_the_rendezvous_is_sent_away();
  test_the_end_of_a_rendezvous_is_seen_by_who_waits();
  std::puts("all passed");
  return 0;
}
