// The server of one rendezvous: a map of keys to values, served by a thread of its own without Python.
//
// torch's TCPStore does the same, but asks the name service for the name of every client that connects, one after
// another in the thread that serves them all; where an answer is lost, every rank waits for five seconds.
//
// A frame, either way, is a uint32 with the length of what follows, then byte strings, each a uint32 length and its
// bytes; all little-endian. The first frame of a connection has the secret alone, and no answer.
// Then each frame is an operation (one letter, rendezvous.cpp has the table) and its arguments; the answer is a list of
// byte strings. A connection has one request at a time; one that breaks a rule is closed.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace deadpool {

class RendezvousServer {
 public:
  // Listens on `address` (numeric IPv4 or IPv6), any free port. Throws std::runtime_error.
  RendezvousServer(const std::string& address, std::string secret);
  // Closes every connection; who waits for a key learns of it.
  ~RendezvousServer();
  RendezvousServer(const RendezvousServer&) = delete;
  RendezvousServer& operator=(const RendezvousServer&) = delete;

  std::uint16_t port() const;

 private:
  class Loop;
  std::unique_ptr<Loop> loop_;
};

}  // namespace deadpool
