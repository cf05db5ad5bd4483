/*
 * disk_full.c
 *		A full disk, for one server that is started with this in LD_PRELOAD.
 *
 * While the file that DISK_FULL names exists, no file of a database grows: the
 * attempt fails with ENOSPC.  The write-ahead log has room, as on a disk of
 * its own; without that the server could do nothing but stop.
 *
 *		gcc -shared -fPIC -o disk_full.so disk_full.c -ldl
 */
#define _GNU_SOURCE

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static int
is_full(int fd, off_t end)
{
	const char *flag = getenv("DISK_FULL");
	char		name[64];
	char		path[PATH_MAX];
	struct stat status;
	ssize_t		length;

	if (flag == NULL || access(flag, F_OK) != 0)
		return 0;
	snprintf(name, sizeof(name), "/proc/self/fd/%d", fd);
	length = readlink(name, path, sizeof(path) - 1);
	if (length < 0)
		return 0;
	path[length] = '\0';
	return strstr(path, "/base/") != NULL && fstat(fd, &status) == 0 &&
		end > status.st_size;
}

static off_t
size_of(const struct iovec *parts, int count)
{
	off_t		size = 0;

	for (int i = 0; i < count; i++)
		size += parts[i].iov_len;
	return size;
}

/* The same call under its two names. */
#define PWRITE(name) \
ssize_t \
name(int fd, const void *data, size_t size, off_t offset) \
{ \
	ssize_t		(*next) (int, const void *, size_t, off_t) = dlsym(RTLD_NEXT, #name); \
	\
	if (!is_full(fd, offset + size)) \
		return next(fd, data, size, offset); \
	errno = ENOSPC; \
	return -1; \
}

#define PWRITEV(name) \
ssize_t \
name(int fd, const struct iovec *parts, int count, off_t offset) \
{ \
	ssize_t		(*next) (int, const struct iovec *, int, off_t) = dlsym(RTLD_NEXT, #name); \
	\
	if (!is_full(fd, offset + size_of(parts, count))) \
		return next(fd, parts, count, offset); \
	errno = ENOSPC; \
	return -1; \
}

#define FALLOCATE(name) \
int \
name(int fd, off_t offset, off_t size) \
{ \
	int			(*next) (int, off_t, off_t) = dlsym(RTLD_NEXT, #name); \
	\
	return is_full(fd, offset + size) ? ENOSPC : next(fd, offset, size); \
}

PWRITE(pwrite)
PWRITE(pwrite64)
PWRITEV(pwritev)
PWRITEV(pwritev64)
FALLOCATE(posix_fallocate)
FALLOCATE(posix_fallocate64)
