/*-------------------------------------------------------------------------
 *
 * deadline.c
 *		End a call of a library that can wait without limit.
 *
 * A timer sends a signal to the thread that calls the library.  It ends the
 * connection if the caller knows its descriptor.  Otherwise it only interrupts
 * a system call, which a library with a blocking socket takes for an error.
 *
 * The caller owns the timer.  sink_amqp.c and sink_nats.c call this file.
 *
 *-------------------------------------------------------------------------
 */
#include <errno.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include "deadline.h"

/* Older versions of the C library do not define it. */
#ifndef sigev_notify_thread_id
#define sigev_notify_thread_id	_sigev_un._tid
#endif

static void end(int number, siginfo_t *info, void *context);

/*
 * Interrupt the calling thread after "limit" milliseconds, and then every
 * "again" milliseconds, because a signal can arrive shortly before the call
 * that waits.  If "fd" is not -1, the signal ends this connection.  Returns
 * false and sets errno if the system has no timer left.  Otherwise the caller
 * calls relay_deadline_clear().
 */
bool
relay_deadline_set(timer_t *timer, int64_t limit, int64_t again, int fd)
{
	struct sigaction action = {.sa_sigaction = end,.sa_flags = SA_SIGINFO};
	struct sigevent event = {
		.sigev_notify = SIGEV_THREAD_ID,
		.sigev_signo = SIGUSR1,
		.sigev_value.sival_int = fd
	};
	struct itimerspec times = {
		.it_value = {limit / 1000, limit % 1000 * 1000000},
		.it_interval = {again / 1000, again % 1000 * 1000000}
	};
	sigset_t	signals;

	/* Without SA_RESTART, so that the system call ends. */
	sigemptyset(&action.sa_mask);
	sigaction(SIGUSR1, &action, NULL);
	/* The relay can have inherited that it is blocked. */
	sigemptyset(&signals);
	sigaddset(&signals, SIGUSR1);
	pthread_sigmask(SIG_UNBLOCK, &signals, NULL);
	event.sigev_notify_thread_id = gettid();
	if (timer_create(CLOCK_MONOTONIC, &event, timer) != 0)
		return false;
	(void) timer_settime(*timer, 0, &times, NULL);
	return true;
}

/*
 * End a connection, or only the system call.  This is the signal handler.
 */
static void
end(int number, siginfo_t *info, void *context)
{
	int			error = errno;

	if (info->si_code == SI_TIMER && info->si_value.sival_int >= 0)
		(void) shutdown(info->si_value.sival_int, SHUT_RDWR);
	errno = error;
}

/*
 * Release a timer.  The calling thread is the one that has set it.
 */
void
relay_deadline_clear(timer_t timer)
{
	(void) timer_delete(timer);
}
