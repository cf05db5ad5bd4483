/*-------------------------------------------------------------------------
 *
 * message.h
 *		A message that the relay holds, and lists of them.
 *
 *-------------------------------------------------------------------------
 */
#ifndef RELAY_MESSAGE_H
#define RELAY_MESSAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct Sink;

typedef enum MessageState
{
	MESSAGE_WAITING,			/* behind another one of its key */
	MESSAGE_READY,				/* in its sink's list, to be delivered */
	MESSAGE_FLYING,				/* handed to its sink */
	MESSAGE_DELIVERED,			/* to be acknowledged */
	MESSAGE_REFUSED,			/* to be refused */
	MESSAGE_UNTRIED,			/* to be given back */
} MessageState;

typedef struct Message
{
	/* As idem_outbox_take() returned it; in the same piece of memory. */
	int64_t		id;
	int			attempt;
	const char *message_id;
	const char *topic;
	const char *key;			/* or NULL */
	const char *payload;
	const char *headers;		/* or NULL */
	const char *created_at;		/* as RFC 3339 has it */
	size_t		payload_length;
	size_t		size;			/* in memory */

	MessageState state;
	int64_t		lease_end;
	bool		extending;		/* the server has been asked */
	int64_t		retry_after;	/* of a refused one; -1: the server's choice */
	char	   *reason;			/* of a refused one */

	/* The sink's. */
	struct Sink *sink;
	uint64_t	tag;
	int64_t		handed_at;
	void	   *delivery;

	/* The list that goes with the state. */
	struct Message *prev;
	struct Message *next;
	/* All that are held, in the order in which they were taken. */
	struct Message *held_prev;
	struct Message *held_next;
	/* The next one of the key, and the bucket that the key's first is in. */
	struct Message *behind;
	struct Message *bucket_next;
	uint32_t	hash;
} Message;

typedef struct MessageList
{
	Message    *first;
	Message    *last;
	int			count;
} MessageList;

extern void list_append(MessageList *list, Message *message);
extern void list_remove(MessageList *list, Message *message);
extern void list_move_all(MessageList *to, MessageList *from);

#endif							/* RELAY_MESSAGE_H */
