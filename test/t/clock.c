/*
 * clock.c
 *		A clock that a test can set, for one server that is started with this in
 *		LD_PRELOAD.
 *
 * The file that CLOCK names has the number of seconds, in 16 bytes of text, by
 * which the server's clock is ahead.  The monotonic clock stays as it is.
 *
 *		gcc -shared -fPIC -o clock.so clock.c
 */
#define _GNU_SOURCE

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const char *lead = "0";

static void __attribute__((constructor))
begin(void)
{
	const char *name = getenv("CLOCK");
	int			fd = name != NULL ? open(name, O_RDONLY) : -1;
	void	   *text;

	if (fd < 0)
		return;
	text = mmap(NULL, 16, PROT_READ, MAP_SHARED, fd, 0);
	if (text != MAP_FAILED)
		lead = text;
	close(fd);
}

int
gettimeofday(struct timeval *restrict now, void *restrict zone)
{
	struct timespec real;

	clock_gettime(CLOCK_REALTIME, &real);
	now->tv_sec = real.tv_sec + atol(lead);
	now->tv_usec = real.tv_nsec / 1000;
	return 0;
}

time_t
time(time_t *result)
{
	struct timeval now;

	gettimeofday(&now, NULL);
	if (result != NULL)
		*result = now.tv_sec;
	return now.tv_sec;
}
