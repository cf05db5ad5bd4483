/*
 * clock.c
 *		A clock that a test can set, for one server that is started with this in
 *		LD_PRELOAD.
 *
 * The file that CLOCK names has, in 32 bytes of text, the number of seconds by
 * which the server's clock is ahead; or "=" and the seconds since 1970 at which
 * it stands still.  The monotonic clock stays as it is.
 *
 *		gcc -shared -fPIC -o clock.so clock.c -lm
 */
#define _GNU_SOURCE

#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define TEXT_SIZE	32

static const char *setting = "0";

static void __attribute__((constructor))
begin(void)
{
	const char *name = getenv("CLOCK");
	int			fd = name != NULL ? open(name, O_RDONLY) : -1;
	void	   *text;

	if (fd < 0)
		return;
	text = mmap(NULL, TEXT_SIZE, PROT_READ, MAP_SHARED, fd, 0);
	if (text != MAP_FAILED)
		setting = text;
	close(fd);
}

int
gettimeofday(struct timeval *restrict now, void *restrict zone)
{
	struct timespec real;

	if (*setting == '=')
	{
		long long	microseconds = llround(atof(setting + 1) * 1e6);

		now->tv_sec = microseconds / 1000000;
		now->tv_usec = microseconds % 1000000;
		return 0;
	}
	clock_gettime(CLOCK_REALTIME, &real);
	now->tv_sec = real.tv_sec + atol(setting);
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
