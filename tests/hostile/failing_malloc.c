// malloc and related functions, with one failing call on the requesting thread. For LD_PRELOAD.
#include <errno.h>
#include <stddef.h>

extern void* __libc_malloc(size_t);
extern void* __libc_calloc(size_t, size_t);
extern void* __libc_realloc(void*, size_t);
extern void* __libc_memalign(size_t, size_t);

static __thread long calls_left = -1;

// Lets a call fail after so many more; returns the remaining number. A negative number disables it.
long fail_after(long calls) {
  const long before = calls_left;
  calls_left = calls;
  return before;
}

static int fails(void) {
  if (calls_left < 0 || calls_left-- > 0) return 0;
  errno = ENOMEM;
  return 1;
}

void* malloc(size_t size) { return fails() ? NULL : __libc_malloc(size); }

void* calloc(size_t count, size_t size) { return fails() ? NULL : __libc_calloc(count, size); }

void* realloc(void* old, size_t size) { return fails() ? NULL : __libc_realloc(old, size); }

void* memalign(size_t alignment, size_t size) {
  return fails() ? NULL : __libc_memalign(alignment, size);
}

void* aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void** place, size_t alignment, size_t size) {
  void* made = memalign(alignment, size);
  if (made == NULL) return ENOMEM;
  *place = made;
  return 0;
}
