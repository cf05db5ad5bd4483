/*-------------------------------------------------------------------------
 *
 * queue.c
 *		The messages that the relay holds: from the take until the server has
 *		the answer.
 *
 * Messages of one topic and key are delivered one at a time, in the order in
 * which they were taken.  The first of them is ready or with its sink, and can
 * be found by a hash of topic and key; the others are chained behind it.  Once
 * it is delivered, the next one is ready.  If it is not, all behind it are
 * given back, for the server hands them out again behind their predecessor.
 *
 *-------------------------------------------------------------------------
 */
#include <stdlib.h>
#include <string.h>

#include "queue.h"
#include "relay.h"
#include "sinks.h"

#define BUCKETS 4096			/* a power of two */

MessageList queue_delivered;
MessageList queue_refused;
MessageList queue_untried;

/* The first ones of their keys. */
static Message *buckets[BUCKETS];

/* All messages, through held_prev and held_next. */
static Message *first_held = NULL;
static Message *last_held = NULL;
static int	held_count = 0;
static size_t held_size = 0;

static Message *leave_key(Message *message, bool go_on);
static void give_back_chain(Message *message);
static Message *find_first(const Message *message);
static uint32_t hash_key(const Message *message);
static bool same_key(const Message *a, const Message *b);

int
queue_count(void)
{
	return held_count;
}

size_t
queue_size(void)
{
	return held_size;
}

/*
 * The one that has been held for longest; the others through held_next.
 */
Message *
queue_first(void)
{
	return first_held;
}

/*
 * Add a message that has been taken, with its sink.
 */
void
queue_add(Message *message)
{
	message->held_prev = last_held;
	*(last_held ? &last_held->held_next : &first_held) = message;
	last_held = message;
	held_count++;
	held_size += message->size;

	if (message->key)
	{
		Message    *first;
		Message   **bucket;

		message->hash = hash_key(message);
		first = find_first(message);
		if (first)
		{
			while (first->behind)
				first = first->behind;
			first->behind = message;
			message->state = MESSAGE_WAITING;
			return;
		}
		bucket = &buckets[message->hash % BUCKETS];
		message->bucket_next = *bucket;
		*bucket = message;
	}
	message->state = MESSAGE_READY;
	list_append(&message->sink->ready, message);
}

/*
 * The sink has got it.
 */
void
queue_fly(Message *message)
{
	list_remove(&message->sink->ready, message);
	message->state = MESSAGE_FLYING;
	list_append(&message->sink->flying, message);
}

/*
 * It is delivered, so the next one of its key is ready.
 */
void
queue_deliver(Message *message)
{
	Message    *next = leave_key(message, true);

	message->state = MESSAGE_DELIVERED;
	list_append(&queue_delivered, message);
	if (next)
	{
		next->state = MESSAGE_READY;
		list_append(&next->sink->ready, next);
	}
}

/*
 * The attempt has failed.
 */
void
queue_refuse(Message *message, int64_t retry_after, const char *reason)
{
	give_back_chain(leave_key(message, false));
	message->state = MESSAGE_REFUSED;
	message->retry_after = retry_after;
	message->reason = relay_copy(reason);
	list_append(&queue_refused, message);
}

/*
 * There was no attempt at this one, nor will there be at those behind it.
 */
void
queue_give_back(Message *message)
{
	message->behind = leave_key(message, false);
	give_back_chain(message);
}

/*
 * Another relay has it.  What has not been tried is given back, of which the
 * server changes only what is still held here: the other relay has to get rid
 * of this one before anybody delivers those behind it.  What has been handed
 * to a sink is answered as always.
 */
void
queue_lost(Message *message)
{
	if (message->state == MESSAGE_READY)
		queue_give_back(message);
	else if (message->state == MESSAGE_WAITING)
	{
		Message    *before = find_first(message);

		while (before && before->behind != message)
			before = before->behind;
		if (before)
			before->behind = NULL;
		give_back_chain(message);
	}
}

/*
 * The server has the answer, so forget the message, which is in no list.
 */
void
queue_drop(Message *message)
{
	*(message->held_prev ? &message->held_prev->held_next : &first_held) =
		message->held_next;
	*(message->held_next ? &message->held_next->held_prev : &last_held) =
		message->held_prev;
	held_count--;
	held_size -= message->size;
	free(message->reason);
	free(message);
}

/*
 * Give back all messages of a sink that it has not got yet.
 */
void
queue_give_back_ready(struct Sink *sink)
{
	while (sink->ready.first)
		queue_give_back(sink->ready.first);
}

/*
 * Take a message that is the first of its key, if it has one, out of the
 * lists.  Returns the one behind it, which takes its place, if the key goes
 * on, and is in no list yet; or NULL.
 */
static Message *
leave_key(Message *message, bool go_on)
{
	Message    *next = message->behind;
	Message   **link = &buckets[message->hash % BUCKETS];

	if (message->state == MESSAGE_READY)
		list_remove(&message->sink->ready, message);
	else
		list_remove(&message->sink->flying, message);
	message->behind = NULL;
	if (!message->key)
		return NULL;
	while (*link != message)
		link = &(*link)->bucket_next;
	if (next && go_on)
	{
		next->bucket_next = message->bucket_next;
		*link = next;
	}
	else
		*link = message->bucket_next;
	return next;
}

/*
 * Give back a message that has left its key, and all behind it.
 */
static void
give_back_chain(Message *message)
{
	while (message)
	{
		Message    *next = message->behind;

		message->behind = NULL;
		message->state = MESSAGE_UNTRIED;
		list_append(&queue_untried, message);
		message = next;
	}
}

/*
 * The first one of that message's key that is here, or NULL.
 */
static Message *
find_first(const Message *message)
{
	Message    *first = buckets[message->hash % BUCKETS];

	while (first && !same_key(first, message))
		first = first->bucket_next;
	return first;
}

/*
 * FNV-1a of topic and key.  Whoever makes up keys can make some collide, which
 * costs a walk through as many messages as the relay holds.
 */
static uint32_t
hash_key(const Message *message)
{
	uint32_t	hash = 2166136261U;
	const char *c;

	for (c = message->topic; *c; c++)
		hash = (hash ^ (unsigned char) *c) * 16777619U;
	hash *= 16777619U;
	for (c = message->key; *c; c++)
		hash = (hash ^ (unsigned char) *c) * 16777619U;
	return hash;
}

static bool
same_key(const Message *a, const Message *b)
{
	return a->hash == b->hash && strcmp(a->key, b->key) == 0 &&
		strcmp(a->topic, b->topic) == 0;
}

void
list_append(MessageList *list, Message *message)
{
	message->next = NULL;
	message->prev = list->last;
	*(list->last ? &list->last->next : &list->first) = message;
	list->last = message;
	list->count++;
}

void
list_remove(MessageList *list, Message *message)
{
	*(message->prev ? &message->prev->next : &list->first) = message->next;
	*(message->next ? &message->next->prev : &list->last) = message->prev;
	message->prev = message->next = NULL;
	list->count--;
}

/*
 * Move all messages of a list to the end of another.
 */
void
list_move_all(MessageList *to, MessageList *from)
{
	while (from->first)
	{
		Message    *message = from->first;

		list_remove(from, message);
		list_append(to, message);
	}
}
