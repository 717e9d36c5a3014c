#include "socket_io.hpp"

#include <dirent.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "crc32c.hpp"
#include "memory.hpp"
#include "text.hpp"

namespace deadpool {
namespace {

// What one core still has in its second-level cache (512 KiB and more on servers of today) when it looks again, the
// kernel's copy and what else runs there included.
constexpr std::uint64_t kPiece = std::uint64_t{256} << 10;

void wait_until_ready(int fd, short events) {
  pollfd entry{fd, events, 0};
  while (poll(&entry, 1, -1) < 0)
    if (errno != EINTR) throw SocketError(errno, text("poll: ", std::strerror(errno)));
}

bool not_ready(int number) { return number == EAGAIN || number == EWOULDBLOCK; }

void send_two(int fd, const void* head, std::size_t head_length, std::uint64_t address, std::uint64_t length) {
  iovec parts[2] = {{const_cast<void*>(head), head_length}, {reinterpret_cast<void*>(address), length}};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  const std::uint64_t total = head_length + length;
  for (std::uint64_t sent = 0; sent < total;) {
    const ssize_t count = sendmsg(fd, &message, MSG_NOSIGNAL);
    if (count < 0) {
      if (errno == EINTR) continue;
      if (!not_ready(errno))
        throw SocketError(errno, text(std::strerror(errno), " after ", sent, " of ", total, " bytes were sent"));
      wait_until_ready(fd, POLLOUT);
      continue;
    }
    sent += static_cast<std::uint64_t>(count);
    auto left = static_cast<std::size_t>(count);
    for (iovec& part : parts) {
      const std::size_t step = std::min(left, part.iov_len);
      part.iov_base = static_cast<char*>(part.iov_base) + step;
      part.iov_len -= step;
      left -= step;
    }
  }
}

std::uint32_t send_pieces(int fd, const void* head, std::size_t head_length, std::uint64_t address,
                          std::uint64_t length, std::uint64_t longest, bool summed) {
  check_range(address, length, "address");
  std::uint32_t crc = 0;
  std::uint64_t sent = 0;
  do {
    const std::uint64_t piece = std::min(longest, length - sent);
    if (summed) crc = crc32c(reinterpret_cast<const void*>(address + sent), piece, crc);
    send_two(fd, head, head_length, address + sent, piece);
    head_length = 0;
    sent += piece;
  } while (sent < length);
  return crc;
}

}  // namespace

void send_all(int fd, const void* head, std::size_t head_length, std::uint64_t address, std::uint64_t length) {
  send_pieces(fd, head, head_length, address, length, length, false);
}

std::uint32_t send_summed(int fd, const void* head, std::size_t head_length, std::uint64_t address,
                          std::uint64_t length) {
  return send_pieces(fd, head, head_length, address, length, kPiece, true);
}

std::uint32_t recv_all(int fd, std::uint64_t address, std::uint64_t length, std::uint32_t seed) {
  check_range(address, length, "address");
  for (std::uint64_t got = 0; got < length;) {
    auto* to = reinterpret_cast<void*>(address + got);
    const ssize_t count = recv(fd, to, std::min(kPiece, length - got), MSG_WAITALL);
    if (count < 0) {
      if (errno == EINTR) continue;
      if (!not_ready(errno))
        throw SocketError(errno, text(std::strerror(errno), " after ", got, " of ", length, " bytes were received"));
      wait_until_ready(fd, POLLIN);
      continue;
    }
    if (count == 0)
      throw SocketError(ECONNRESET, text("the peer closed the connection after ", got, " of ", length, " bytes"));
    seed = crc32c(to, static_cast<std::size_t>(count), seed);
    got += static_cast<std::uint64_t>(count);
  }
  return seed;
}

std::vector<std::pair<int, std::uint64_t>> open_sockets() {
  const std::unique_ptr<DIR, int (*)(DIR*)> descriptors(opendir("/proc/self/fd"), closedir);
  if (!descriptors) throw SocketError(errno, text("/proc/self/fd: ", std::strerror(errno)));
  std::vector<std::pair<int, std::uint64_t>> found;
  while (const dirent* entry = readdir(descriptors.get())) {
    if (entry->d_name[0] == '.') continue;
    const int fd = std::atoi(entry->d_name);
    struct stat status;
    if (fstat(fd, &status) == 0 && S_ISSOCK(status.st_mode)) found.emplace_back(fd, status.st_ino);  // else closed meanwhile
  }
  return found;
}

}  // namespace deadpool
