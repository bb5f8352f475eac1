/* Shifts the wall clock of a process by the seconds that the link at CLOCK_SHIFT points to, once it is there, or that
   CLOCK_SHIFT is. The monotonic clock stays: what settimeofday(2) does, without its rights and for these processes only.
   With CLOCK_SHIFT_WORKER, only in that pod of an Indexed Job. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long long shift_ns(void) {
  char text[64];
  const char *path = getenv("CLOCK_SHIFT"), *worker = getenv("CLOCK_SHIFT_WORKER"), *index = getenv("JOB_COMPLETION_INDEX");
  if (!path || (worker && (!index || strcmp(worker, index)))) return 0;
  ssize_t size = readlink(path, text, sizeof text - 1);
  if (size < 0) return (long long)(atof(path) * 1e9);
  text[size] = 0;
  return (long long)(atof(text) * 1e9);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  int failed = syscall(SYS_clock_gettime, clock, now);
  if (failed || (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE)) return failed;
  long long ns = now->tv_sec * 1000000000LL + now->tv_nsec + shift_ns();
  now->tv_sec = ns / 1000000000LL;
  now->tv_nsec = ns % 1000000000LL;
  return 0;
}

int gettimeofday(struct timeval *now, void *zone) {
  struct timespec exact;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &exact);
  now->tv_sec = exact.tv_sec;
  now->tv_usec = exact.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *out) {
  struct timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  if (out) *out = exact.tv_sec;
  return exact.tv_sec;
}
