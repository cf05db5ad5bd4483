/*
 * Preload this to get a name server that does not answer for the host
 * "silent.test": the resolver gives up after ten seconds.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <string.h>
#include <unistd.h>

int
getaddrinfo(const char *node, const char *service, const struct addrinfo *hints,
			struct addrinfo **result)
{
	int			(*real) (const char *, const char *, const struct addrinfo *,
						 struct addrinfo **);

	if (node && strcmp(node, "silent.test") == 0)
	{
		sleep(10);
		return EAI_AGAIN;
	}
	*(void **) &real = dlsym(RTLD_NEXT, "getaddrinfo");
	return real(node, service, hints, result);
}
