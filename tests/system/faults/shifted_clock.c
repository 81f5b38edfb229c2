/* Preloaded into a run: shifts CLOCK_REALTIME of the processes of one service by what a file says.
 *
 * $ASYNCRL_TEST_CLOCKS is a folder; the file named by $ASYNCRL_SERVICE in it holds seconds, 8 bytes, mapped.
 * Waits until a point of the wall clock are shifted back, as the kernel does for a clock that was set. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t none, *shift = &none;

__attribute__((constructor)) static void find(void) {
  const char *folder = getenv("ASYNCRL_TEST_CLOCKS"), *service = getenv("ASYNCRL_SERVICE");
  char path[4096];
  if (!folder || !service) return;
  snprintf(path, sizeof path, "%s/%s", folder, service);
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return;
  void *mapped = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
  if (mapped != MAP_FAILED) shift = mapped;
  close(file);
}

static struct timespec back(const struct timespec *until) {
  struct timespec real = *until;
  real.tv_sec -= *shift;
  return real;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int result = real(clock, now);
  if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *shift;
  return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec found;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &found);
  now->tv_sec = found.tv_sec;
  now->tv_usec = found.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *now) {
  struct timespec found;
  clock_gettime(CLOCK_REALTIME, &found);
  if (now) *now = found.tv_sec;
  return found.tv_sec;
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
  static int (*real)(sem_t *, const struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "sem_timedwait");
  struct timespec moved = back(until);
  return real(semaphore, &moved);
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
  static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
  if (!real) real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2"); /* the oldest has another form */
  struct timespec moved = until->tv_sec > 1000000000 ? back(until) : *until; /* else it is a monotonic clock's */
  return real(condition, mutex, &moved);
}
