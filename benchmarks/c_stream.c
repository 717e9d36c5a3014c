// The yardstick of benchmarks/transport.py: one TCP stream over loopback, memory to memory, with nothing on top.
//
//   c_stream recv BYTES         listens, prints its port, then takes BYTES again and again, each answered by one byte
//   c_stream send BYTES PORT    at each line on standard input sends BYTES, waits for the byte, prints the seconds
//
// Both touch their memory before, use the system's own buffer sizes (which it tunes), and hand over as much as the system
// takes in a call.
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static void check(int good, const char* what) {
  if (good) return;
  perror(what);
  exit(1);
}

static double now_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void take(int fd, char* memory, size_t bytes) {
  for (size_t got = 0; got < bytes;) {
    const ssize_t count = recv(fd, memory + got, bytes - got, 0);
    if (count == 0) exit(0);
    check(count > 0, "recv");
    got += (size_t)count;
  }
  check(send(fd, "k", 1, 0) == 1, "send");
}

static void give(int fd, const char* memory, size_t bytes) {
  const double begin_s = now_s();
  for (size_t sent = 0; sent < bytes;) {
    const ssize_t count = send(fd, memory + sent, bytes - sent, 0);
    check(count > 0, "send");
    sent += (size_t)count;
  }
  char answer;
  check(recv(fd, &answer, 1, 0) == 1, "recv");
  printf("%.9f\n", now_s() - begin_s);
  fflush(stdout);
}

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  const size_t bytes = strtoull(argv[2], NULL, 10);
  char* memory = malloc(bytes);
  check(memory != NULL, "malloc");
  memset(memory, 1, bytes);
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t length = sizeof at;
  if (strcmp(argv[1], "recv") == 0) {
    check(bind(fd, (struct sockaddr*)&at, length) == 0, "bind");
    check(listen(fd, 1) == 0, "listen");
    check(getsockname(fd, (struct sockaddr*)&at, &length) == 0, "getsockname");
    printf("%d\n", ntohs(at.sin_port));
    fflush(stdout);
    const int peer = accept(fd, NULL, NULL);
    check(peer >= 0, "accept");
    for (;;) take(peer, memory, bytes);
  }
  if (argc < 4) return 2;
  at.sin_port = htons((unsigned short)atoi(argv[3]));
  check(connect(fd, (struct sockaddr*)&at, length) == 0, "connect");
  char line[16];
  while (fgets(line, sizeof line, stdin) != NULL) give(fd, memory, bytes);
  return 0;
}
