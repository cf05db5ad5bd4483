/*-------------------------------------------------------------------------
 *
 * message.h
 *		A message that the relay holds, and lists of messages.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RELAY_MESSAGE_H
#define IDEM_RELAY_MESSAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct RelaySink;
struct RelayText;

/* Instead of a time: another relay has the message. */
#define RELAY_LEASE_LOST	INT64_MAX

/* answers.c extends leases up to RELAY_IN_FLIGHT, so the order matters. */
typedef enum RelayMessageState
{
	RELAY_WAITING,				/* behind another message of its key */
	RELAY_READY,				/* in its sink's list "ready" or "retries" */
	RELAY_IN_FLIGHT,			/* in its sink's list "in_flight" */
	RELAY_DELIVERED,			/* in the queue's list of that name */
	RELAY_REFUSED,				/* likewise */
	RELAY_UNTRIED,				/* likewise; to be released */
} RelayMessageState;

typedef struct RelayMessage
{
	/* From idem_outbox_take().  The strings follow in the same allocation. */
	int64_t		id;
	int			attempt;
	const char *message_id;
	const char *label;			/* for the log, which must not show a key */
	const char *topic;
	const char *key;			/* or NULL */
	const char *payload;
	const char *headers;		/* or NULL */
	const char *created_at;		/* in the format of RFC 3339 */
	const char *failed_at;		/* the time of the last error, or NULL */
	size_t		payload_length;
	size_t		size;			/* of the allocation */
	int64_t		published_at;	/* on this machine's clock; 0: unknown */
	unsigned	timeline;		/* of the server that had it */

	RelayMessageState state;
	int64_t		lease_end;		/* or RELAY_LEASE_LOST */
	bool		extending;		/* the server is extending the lease */
	int64_t		retry_after;	/* if refused, in ms; -1: server's choice */
	bool		counted;		/* if refused: the attempt counts */
	char	   *reason;			/* if refused */
	bool		answer_alone;	/* a call about it found a locked row */
	bool		call_failed;	/* the server does not count its failure */
	int64_t		blocked_until;	/* its row is locked; no call before that */

	/* If it is a claim to complete; see completer.c. */
	const char *claim_token;	/* NULL: it is none */
	struct RelayText *response;
	long		status;			/* of the response; 0: it has none */
	int64_t		due;			/* if it is deferred, its next attempt */
	char	   *response_type;	/* or NULL */

	int			failures;		/* that are known, here or at other relays */
	int64_t		turn;			/* of a retry; see choice.c */
	bool		abandoned;		/* relays have left it without an answer */
	bool		alone;			/* is only sent while no other is in flight */
	bool		apart;			/* is sent in a batch of its own */

	/* For the sink, while the message is in flight. */
	struct RelaySink *sink;
	uint64_t	tag;
	int64_t		handed_at;		/* 0: not handed over */
	void	   *delivery;

	/* The list that belongs to the state. */
	struct RelayMessage *prev;
	struct RelayMessage *next;
	/* All messages of the queue, in the order in which they were taken. */
	struct RelayMessage *held_prev;
	struct RelayMessage *held_next;
	/* The next message of the key, and the next in the key's hash bucket. */
	struct RelayMessage *behind;
	struct RelayMessage *bucket_next;
	uint32_t	hash;
} RelayMessage;

typedef struct RelayMessageList
{
	RelayMessage *first;
	RelayMessage *last;
	int			count;
	size_t		size;			/* in bytes */
} RelayMessageList;

extern void relay_list_append(RelayMessageList *list, RelayMessage *message);
extern void relay_list_insert(RelayMessageList *list, RelayMessage *before,
							  RelayMessage *message);
extern void relay_list_remove(RelayMessageList *list, RelayMessage *message);

#endif							/* IDEM_RELAY_MESSAGE_H */
