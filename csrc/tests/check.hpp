// Checks for the test programs here: the first that fails prints where and ends the program.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                \
    }                                                                              \
  } while (false)

#define CHECK_THROWS(Type, says, expression)                                                                           \
  do {                                                                                                                 \
    std::string heard = "nothing";                                                                                     \
    try {                                                                                                              \
      (void)(expression);                                                                                              \
    } catch (const Type& error) {                                                                                      \
      heard = error.what();                                                                                            \
    }                                                                                                                  \
    if (heard.find(says) == std::string::npos) {                                                                       \
      std::fprintf(stderr, "%s:%d: %s should throw %s with \"%s\", got: %s\n", __FILE__, __LINE__, #expression, #Type, \
                   says, heard.c_str());                                                                               \
      std::exit(1);                                                                                                    \
    }                                                                                                                  \
  } while (false)
