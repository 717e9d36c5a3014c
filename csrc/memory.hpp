// Words and ranges of memory shared between worker and agent, named by address: the mapping belongs to the caller.
#pragma once

#include <cstdint>

namespace deadpool {

// The word at a flag or counter's address. Throws invalid_argument when it is null or not aligned to 8 bytes: only an
// aligned word is written whole. `name` is the argument's name in the message.
std::uint64_t* shared_word(std::uint64_t address, const char* name);

// Throws invalid_argument for a null range with a length, or one that runs past the end of the address space.
void check_range(std::uint64_t address, std::uint64_t length, const char* name);

// Throws invalid_argument if either range is bad or the two overlap.
void check_copy(std::uint64_t source, std::uint64_t destination, std::uint64_t length);

// memcpy for data that this core will not read again. Writes past the caches where the processor can: faster for what
// does not fit them, and the training loop's working set stays in.
void copy_past_caches(void* destination, const void* source, std::uint64_t length);

std::uint64_t load_u64(const std::uint64_t* word);                // acquire
void store_u64(std::uint64_t* word, std::uint64_t value);         // release
std::uint64_t add_u64(std::uint64_t* word, std::uint64_t value);  // acquire and release; returns the value after

enum class WaitResult : int { timed_out = 0, reached = 1, stopped = 2 };

// Waits until *word >= value. `stop`, where not null, ends the wait early once *stop >= stop_value; where both hold,
// reached wins: what was waited for has happened.
WaitResult wait_u64_at_least(const std::uint64_t* word, std::uint64_t value, double timeout_s,
                             const std::uint64_t* stop = nullptr, std::uint64_t stop_value = 0);

// Makes every page of the range present and writable, so that the first snapshot does not pay for it. Leaves the
// contents as they are. Throws runtime_error when the memory cannot be had (shared memory full: without this, a later
// write would end the process with SIGBUS).
void prefault(std::uint64_t address, std::uint64_t length);

}  // namespace deadpool
