// Whole amounts through a connected stream socket, without Python, for threads that move snapshots; and which sockets
// this process has.
//
// The socket should be blocking: then the kernel waits, and a call moves all that it can; on one that is not, the thread
// waits in poll(), at two more system calls each time. There is no timeout; who wants to end a call shuts the socket
// down from another thread, and it returns at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace deadpool {

// The system's error number, and what was done when it came up. A peer that closed in the middle is ECONNRESET.
class SocketError : public std::runtime_error {
 public:
  SocketError(int number, const std::string& what) : std::runtime_error(what), number_(number) {}
  int number() const { return number_; }

 private:
  int number_;
};

// Sends `head`, then the bytes. Throws SocketError.
void send_all(int fd, const void* head, std::size_t head_length, std::uint64_t address, std::uint64_t length);

// The same, and returns the CRC32C of the bytes without the head: taken of each piece just before it is sent, so that
// memory is read once for both.
std::uint32_t send_summed(int fd, const void* head, std::size_t head_length, std::uint64_t address,
                          std::uint64_t length);

// Receives `length` bytes to `address`; returns the CRC32C of them, going on from `seed`. The checksum is taken of each
// piece as it comes, while it is in this core's cache. Throws SocketError.
std::uint32_t recv_all(int fd, std::uint64_t address, std::uint64_t length, std::uint32_t seed = 0);

// Every socket of this process, connected or not: descriptor and inode, which tells it from one that had the number
// before. Throws SocketError where the kernel does not say.
std::vector<std::pair<int, std::uint64_t>> open_sockets();

}  // namespace deadpool
