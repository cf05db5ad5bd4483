/*
 * Preload this to get a name server that does not answer for the host
 * "silent.test": the resolver gives up after ten seconds.  The host "two.test" has
 * the addresses 127.0.0.2 and 127.0.0.1.
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
	if (node && strcmp(node, "two.test") == 0)
	{
		struct addrinfo *last;
		int			status = real("127.0.0.2", service, hints, result);

		if (status != 0)
			return status;
		for (last = *result; last->ai_next; last = last->ai_next)
			;
		return real("127.0.0.1", service, hints, &last->ai_next);
	}
	return real(node, service, hints, result);
}
