#include "rendezvous.hpp"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "text.hpp"

namespace deadpool {
namespace {

using Strings = std::vector<std::string>;

constexpr std::size_t kLength = sizeof(std::uint32_t);
// A group of 4,096 gloo members publishes 32 KiB each; who asks for all of them in one frame gets 128 MiB.
constexpr std::uint32_t kLongestFrame = std::uint32_t{1} << 28;
constexpr std::size_t kRead = std::size_t{1} << 16;

class File {
 public:
  explicit File(int fd) : fd_(fd) {}
  File(File&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  File& operator=(File&&) = delete;
  ~File() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

void put_length(std::string& out, std::size_t length) {
  const std::array<char, kLength> bytes = {static_cast<char>(length), static_cast<char>(length >> 8),
                                           static_cast<char>(length >> 16), static_cast<char>(length >> 24)};
  out.append(bytes.data(), bytes.size());
}

std::uint32_t length_at(const char* at) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(at);
  return bytes[0] | bytes[1] << 8 | bytes[2] << 16 | static_cast<std::uint32_t>(bytes[3]) << 24;
}

// False where the frame's lengths do not add up.
bool take_strings(const char* at, std::size_t left, Strings& out) {
  while (left != 0) {
    if (left < kLength) return false;
    const std::size_t length = length_at(at);
    if (length > left - kLength) return false;
    out.emplace_back(at + kLength, length);
    at += kLength + length;
    left -= kLength + length;
  }
  return true;
}

// In a time that does not tell how much of it is right.
bool same(const std::string& one, const std::string& other) {
  unsigned char difference = one.size() != other.size();
  for (std::size_t i = 0; i < one.size() && i < other.size(); ++i)
    difference = static_cast<unsigned char>(difference | (one[i] ^ other[i]));
  return difference == 0;
}

bool to_number(const std::string& digits, std::int64_t& out) {
  const char* end = digits.data() + digits.size();
  const auto [at, error] = std::from_chars(digits.data(), end, out);
  return error == std::errc() && at == end && !digits.empty();
}

struct Client {
  explicit Client(File f) : file(std::move(f)) {}

  File file;
  std::string in;
  std::string out;
  bool known = false;  // has shown the secret
  bool stuck = false;  // does not read, so that epoll is to tell when it does
  Strings wanted;      // the keys of a request that waits
  std::size_t missing = 0;
  bool wants_values = false;
};

[[noreturn]] void fail(const char* what, int number) { throw std::runtime_error(text(what, ": ", std::strerror(number))); }

File listen_on(const std::string& address) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_PASSIVE;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(address.c_str(), "0", &hints, &found))
    throw std::runtime_error(text("a rendezvous listens on a numeric address, got '", address, "': ", gai_strerror(error)));
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owned(found, freeaddrinfo);
  File file(socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (file.get() < 0) fail("socket", errno);
  if (bind(file.get(), found->ai_addr, found->ai_addrlen) < 0) fail(text("bind to ", address).c_str(), errno);
  if (listen(file.get(), SOMAXCONN) < 0) fail("listen", errno);
  return file;
}

}  // namespace

class RendezvousServer::Loop {
 public:
  Loop(const std::string& address, std::string secret)
      : secret_(std::move(secret)),
        listener_(listen_on(address)),
        stop_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        epoll_(epoll_create1(EPOLL_CLOEXEC)) {
    if (listener_.get() < 0 || stop_.get() < 0 || epoll_.get() < 0) fail("a rendezvous needs three descriptors", errno);
    watch(EPOLL_CTL_ADD, listener_.get(), EPOLLIN);
    watch(EPOLL_CTL_ADD, stop_.get(), EPOLLIN);
    thread_ = std::thread([this] { run(); });
  }
  ~Loop() {
    if (getpid() != owner_) {  // a forked child has a copy of this, and no such thread
      thread_.detach();
      return;
    }
    const std::uint64_t one = 1;
    while (write(stop_.get(), &one, sizeof one) < 0 && errno == EINTR) {}
    thread_.join();
  }

  std::uint16_t port() const {
    sockaddr_storage bound{};
    socklen_t length = sizeof bound;
    if (getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&bound), &length) < 0) fail("getsockname", errno);
    return ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(bound).sin6_port
                                             : reinterpret_cast<sockaddr_in&>(bound).sin_port);
  }

 private:
  void watch(int action, int fd, std::uint32_t events) {
    epoll_event event{};
    event.events = events;
    event.data.fd = fd;
    if (epoll_ctl(epoll_.get(), action, fd, &event) < 0) fail("epoll_ctl", errno);
  }

  void run() {
    std::array<epoll_event, 64> events{};
    for (;;) {
      const int count = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), -1);
      if (count < 0 && errno != EINTR) return;  // nothing that a client could do brings this about
      for (int i = 0; i < count; ++i) {
        const int fd = events[i].data.fd;
        if (fd == stop_.get()) return;
        if (fd == listener_.get()) {
          accept_all();
        } else if (const auto found = clients_.find(fd); found != clients_.end()) {
          if (!serve(found->second, events[i].events)) drop(fd);
        }
      }
    }
  }

  void accept_all() {
    for (;;) {
      File file(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (file.get() < 0) {
        if (errno == EINTR || errno == ECONNABORTED) continue;
        // Without a descriptor left the listener would wake this thread for ever: let the others be served in between.
        if (errno == EMFILE || errno == ENFILE) std::this_thread::sleep_for(std::chrono::milliseconds(10));
        return;
      }
      const int on = 1, fd = file.get();
      setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
      clients_.emplace(fd, std::move(file));
      watch(EPOLL_CTL_ADD, fd, EPOLLIN);
    }
  }

  void drop(int fd) {
    for (const std::string& key : clients_.at(fd).wanted)
      if (const auto waiting = waiting_.find(key); waiting != waiting_.end()) {
        waiting->second.erase(fd);
        if (waiting->second.empty()) waiting_.erase(waiting);
      }
    clients_.erase(fd);  // closes it, which takes it from epoll
  }

  // False if the connection is over.
  bool serve(Client& client, std::uint32_t events) {
    if ((events & EPOLLOUT) != 0 && !flush(client)) return false;
    if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) == 0) return true;
    std::array<char, kRead> buffer;
    for (;;) {
      const ssize_t count = recv(client.file.get(), buffer.data(), buffer.size(), 0);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return true;
      if (count <= 0) return false;
      client.in.append(buffer.data(), static_cast<std::size_t>(count));
      if (!take_frames(client)) return false;
      if (static_cast<std::size_t>(count) < buffer.size()) return true;  // epoll tells of more
    }
  }

  bool take_frames(Client& client) {
    std::size_t at = 0;
    while (client.in.size() - at >= kLength) {
      const std::size_t length = length_at(client.in.data() + at);
      if (length > (client.known ? kLongestFrame : secret_.size() + kLength)) return false;
      if (client.in.size() - at - kLength < length) break;
      Strings words;
      if (!take_strings(client.in.data() + at + kLength, length, words)) return false;
      at += kLength + length;
      if (!client.known) {
        if (words.size() != 1 || !same(words[0], secret_)) return false;
        client.known = true;
      } else if (client.missing != 0 || words.empty() || !obey(client, words)) {
        return false;
      }
    }
    client.in.erase(0, at);
    return true;
  }

  // The table of operations. False if it is none of them.
  bool obey(Client& client, Strings& words) {
    const std::string operation = std::move(words[0]);
    words.erase(words.begin());
    if (operation == "S" && words.size() % 2 == 0) {  // set: key, value, …
      for (std::size_t i = 0; i < words.size(); i += 2) set(words[i], std::move(words[i + 1]));
      return answer(client, {});
    }
    if (operation == "G" || operation == "W") {  // get, wait: keys; answered once all are there
      client.wants_values = operation == "G";
      return await(client, std::move(words));
    }
    if (operation == "C") {  // check: keys
      std::size_t there = 0;
      for (const std::string& key : words) there += values_.count(key);
      return answer(client, {there == words.size() ? "1" : "0"});
    }
    if (operation == "A" && words.size() == 2) return add(client, words);
    if (operation == "X" && words.size() == 3) {  // compare and set: key, expected, desired; as torch's stores do
      const auto found = values_.find(words[0]);
      if (found == values_.end() && !words[1].empty()) return answer(client, {words[1]});
      if (found != values_.end() && found->second != words[1]) return answer(client, {found->second});
      set(words[0], words[2]);
      return answer(client, {words[2]});
    }
    if (operation == "P" && words.size() == 2) {  // append: key, value
      set(words[0], values_[words[0]] + words[1]);
      return answer(client, {});
    }
    if (operation == "D" && words.size() == 1) return answer(client, {values_.erase(words[0]) != 0 ? "1" : "0"});
    if (operation == "N" && words.empty()) return answer(client, {std::to_string(values_.size())});
    return false;
  }

  bool add(Client& client, const Strings& words) {  // key, number; kept as digits, as torch's stores do
    std::int64_t sum = 0, amount = 0;
    const auto found = values_.find(words[0]);
    if (!to_number(words[1], amount) || (found != values_.end() && !to_number(found->second, sum))) return false;
    if (__builtin_add_overflow(sum, amount, &sum)) return false;
    set(words[0], std::to_string(sum));
    return answer(client, {std::to_string(sum)});
  }

  void set(const std::string& key, std::string value) {
    values_[key] = std::move(value);
    const auto waiting = waiting_.find(key);
    if (waiting == waiting_.end()) return;
    const std::unordered_set<int> woken = std::move(waiting->second);
    waiting_.erase(waiting);
    for (const int fd : woken) {
      Client& client = clients_.at(fd);
      // Looked for again: one may have been deleted meanwhile.
      if (--client.missing == 0 && !await(client, std::exchange(client.wanted, {})))
        shutdown(fd, SHUT_RDWR);  // epoll tells of it, and it is dropped
    }
  }

  bool await(Client& client, Strings keys) {
    client.wanted = std::move(keys);
    for (const std::string& key : client.wanted)
      if (values_.count(key) == 0 && waiting_[key].insert(client.file.get()).second) ++client.missing;
    return client.missing != 0 || give(client);
  }

  bool give(Client& client) {
    Strings values;
    if (client.wants_values)
      for (const std::string& key : client.wanted) values.push_back(values_[key]);
    client.wanted.clear();
    return answer(client, values);
  }

  bool answer(Client& client, const Strings& words) {
    std::size_t length = 0;
    for (const std::string& word : words) length += kLength + word.size();
    if (length > kLongestFrame) return false;
    put_length(client.out, length);
    for (const std::string& word : words) {
      put_length(client.out, word.size());
      client.out += word;
    }
    return flush(client);
  }

  bool flush(Client& client) {
    std::size_t sent = 0;
    while (sent < client.out.size()) {
      const ssize_t count =
          send(client.file.get(), client.out.data() + sent, client.out.size() - sent, MSG_NOSIGNAL);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0 && errno != EAGAIN && errno != EWOULDBLOCK) return false;
      if (count < 0) break;
      sent += static_cast<std::size_t>(count);
    }
    client.out.erase(0, sent);
    if (const bool more = !client.out.empty(); more != client.stuck) {
      client.stuck = more;
      watch(EPOLL_CTL_MOD, client.file.get(), more ? EPOLLIN | EPOLLOUT : EPOLLIN);
    }
    return true;
  }

  const pid_t owner_ = getpid();
  const std::string secret_;
  File listener_;
  File stop_;
  File epoll_;
  std::unordered_map<int, Client> clients_;
  std::unordered_map<std::string, std::string> values_;
  std::unordered_map<std::string, std::unordered_set<int>> waiting_;  // key -> clients
  std::thread thread_;
};

RendezvousServer::RendezvousServer(const std::string& address, std::string secret)
    : loop_(std::make_unique<Loop>(address, std::move(secret))) {}

RendezvousServer::~RendezvousServer() = default;

std::uint16_t RendezvousServer::port() const { return loop_->port(); }

}  // namespace deadpool
