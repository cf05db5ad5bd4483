/*-------------------------------------------------------------------------
 *
 * queue.c
 *		The messages that the relay holds, from the take until the server has
 *		confirmed the answer.
 *
 * Messages of one topic and key are delivered one at a time, in the order in
 * which they were taken.  The first message of a key is ready or in flight,
 * and a hash table finds it by topic and key.  The other messages of the key
 * are chained behind it.  After the first one is delivered, the next one
 * becomes ready.  If the first one is refused or released, those behind it are
 * released, because the server returns them again after their predecessor.
 * None is held behind a message that has failed before, because those could
 * fill the relay.  But if the relay has lost the first one's lease, the server
 * would return them at once.
 *
 * A RelayQueue owns its messages.  taker.c adds them, dispatch.c hands them
 * over, sink.c reports the outcome, and answers.c drops them.
 *
 *-------------------------------------------------------------------------
 */
#include <stdlib.h>
#include <string.h>

#include "memory.h"
#include "queue.h"
#include "sink.h"
#include "text.h"

static RelayMessage *leave_key(RelayQueue *queue, RelayMessage *message,
							   bool promote_next);
static void count_retry(const RelayMessage *message, bool begins);
static void make_ready(RelayMessage *message);
static RelayMessageList *ready_list(const RelayMessage *message);
static void release_chain(RelayQueue *queue, RelayMessage *message);
static RelayMessage *find_first(const RelayQueue *queue,
								const RelayMessage *message);
static uint32_t hash_key(const RelayMessage *message);
static bool same_key(const RelayMessage *a, const RelayMessage *b);

/*
 * Add a message that was taken.  Its strings, "size", "sink" and "failures"
 * are set.  The queue owns it afterwards.
 */
void
relay_queue_add(RelayQueue *queue, RelayMessage *message)
{
	message->held_prev = queue->last;
	*(queue->last ? &queue->last->held_next : &queue->first) = message;
	queue->last = message;
	queue->count++;
	queue->size += message->size;
	message->sink->held++;
	message->sink->held_size += message->size;

	if (message->key)
	{
		RelayMessage *first;
		RelayMessage **bucket;

		message->hash = hash_key(message);
		first = find_first(queue, message);
		if (first && first->failures > 0 &&
			first->lease_end != RELAY_LEASE_LOST)
		{
			release_chain(queue, message);
			return;
		}
		if (first)
		{
			while (first->behind)
				first = first->behind;
			first->behind = message;
			message->state = RELAY_WAITING;
			return;
		}
		bucket = &queue->buckets[message->hash % RELAY_QUEUE_BUCKETS];
		message->bucket_next = *bucket;
		*bucket = message;
	}
	make_ready(message);
}

/*
 * Mark a ready message as in flight.  The caller passes it to its sink.
 */
void
relay_queue_hand_over(RelayMessage *message, int64_t now)
{
	RelaySink  *sink = message->sink;

	relay_list_remove(ready_list(message), message);
	message->state = RELAY_IN_FLIGHT;
	message->handed_at = now;
	relay_list_append(&sink->in_flight, message);
	sink->after_retry = message->failures > 0;
	count_retry(message, true);
}

/*
 * Make a message in flight the first of the ready ones again.
 */
void
relay_queue_return(RelayMessage *message)
{
	relay_list_remove(&message->sink->in_flight, message);
	count_retry(message, false);
	message->state = RELAY_READY;
	message->handed_at = 0;
	relay_list_insert(ready_list(message), NULL, message);
}

/*
 * Make a claim that is refused ready again, instead of answering the server.
 */
void
relay_queue_retry(RelayQueue *queue, RelayMessage *message)
{
	relay_list_remove(&queue->refused, message);
	free(message->reason);
	message->reason = NULL;
	relay_text_clear(message->response);
	make_ready(message);
}

/*
 * Mark a message in flight as delivered.  The next one of its key becomes
 * ready, unless it is the same message, which was taken again.
 */
void
relay_queue_deliver(RelayQueue *queue, RelayMessage *message)
{
	RelayMessage *next = leave_key(queue, message, true);

	message->state = RELAY_DELIVERED;
	relay_list_append(&queue->delivered, message);
	if (next)
		make_ready(next);
	if (next && next->id == message->id &&
		next->timeline == message->timeline)
		relay_queue_deliver(queue, next);
}

/*
 * Return a message that is ready or in flight to the server, with the reason
 * and whether the attempt counts, and release the messages behind it.
 */
void
relay_queue_refuse(RelayQueue *queue, RelayMessage *message,
				   int64_t retry_after, bool counted, const char *reason)
{
	release_chain(queue, leave_key(queue, message, false));
	message->state = RELAY_REFUSED;
	message->retry_after = retry_after;
	message->counted = counted;
	message->reason = relay_copy(reason);
	relay_list_append(&queue->refused, message);
}

/*
 * Release a message that is ready or in flight, and those behind it, without
 * counting an attempt.
 */
void
relay_queue_release(RelayQueue *queue, RelayMessage *message)
{
	message->behind = leave_key(queue, message, false);
	release_chain(queue, message);
}

/*
 * Handle a message whose lease another relay holds now.  If it is not in
 * flight, release it and those behind it.  The server releases only the leases
 * that this relay still holds, so the messages behind it wait until the other
 * relay has answered this one.  A message in flight is answered as usual.
 */
void
relay_queue_lose(RelayQueue *queue, RelayMessage *message)
{
	if (message->state == RELAY_READY)
		relay_queue_release(queue, message);
	else if (message->state == RELAY_WAITING)
	{
		RelayMessage *before = find_first(queue, message);

		while (before && before->behind != message)
			before = before->behind;
		if (before)
			before->behind = NULL;
		release_chain(queue, message);
	}
}

/*
 * Return whether a message is held whose lease has expired.  One whose row is
 * locked, or whose failure the server does not count, is left out, because
 * that can last.
 */
bool
relay_queue_has_expired(const RelayQueue *queue, int64_t now)
{
	const RelayMessage *message = queue->first;

	while (message && (message->lease_end > now || message->answer_alone ||
					   message->call_failed || message->blocked_until > now))
		message = message->held_next;
	return message != NULL;
}

/*
 * Remove and free a message that is in no list, after the server has confirmed
 * its answer or when the relay ends.
 */
void
relay_queue_drop(RelayQueue *queue, RelayMessage *message)
{
	*(message->held_prev ? &message->held_prev->held_next : &queue->first) =
		message->held_next;
	*(message->held_next ? &message->held_next->held_prev : &queue->last) =
		message->held_prev;
	queue->count--;
	queue->size -= message->size;
	message->sink->held--;
	message->sink->held_size -= message->size;
	free(message->reason);
	free(message->response_type);
	relay_text_free(message->response);
	free(message);
}

/*
 * Remove a message, which is ready or in flight, from its sink's list and from
 * its key.  Returns the message behind it, which is in no list yet, or NULL.
 * With "promote_next", that one is the first of the key afterwards; otherwise
 * the key has none.
 */
static RelayMessage *
leave_key(RelayQueue *queue, RelayMessage *message, bool promote_next)
{
	RelayMessage *next = message->behind;
	RelayMessage **link = &queue->buckets[message->hash % RELAY_QUEUE_BUCKETS];

	relay_list_remove(message->state == RELAY_READY ? ready_list(message) :
					  &message->sink->in_flight, message);
	if (message->state == RELAY_IN_FLIGHT)
		count_retry(message, false);
	if (message->sink->abandoned == message)
		message->sink->abandoned = NULL;
	message->behind = NULL;
	if (!message->key)
		return NULL;
	while (*link != message)
		link = &(*link)->bucket_next;
	*link = message->bucket_next;
	if (next && promote_next)
	{
		next->bucket_next = *link;
		*link = next;
	}
	return next;
}

/*
 * Count a message that begins or ends to be in flight, if it is a retry.
 */
static void
count_retry(const RelayMessage *message, bool begins)
{
	RelaySink  *sink = message->sink;

	if (message->failures == 0)
		return;
	sink->retrying += begins ? 1 : -1;
	sink->retrying_size += begins ? message->size : -message->size;
}

/*
 * Add a message that is in no list to the ready messages of its sink, as the
 * last of those with the same turn.
 */
static void
make_ready(RelayMessage *message)
{
	RelayMessageList *list = ready_list(message);
	RelayMessage *before = list->last;

	message->state = RELAY_READY;
	while (before && before->turn > message->turn)
		before = before->prev;
	relay_list_insert(list, before, message);
}

/*
 * Return the list of a ready message.
 */
static RelayMessageList *
ready_list(const RelayMessage *message)
{
	return message->failures > 0 ? &message->sink->retries :
		&message->sink->ready;
}

/*
 * Release a message that is in no list, or NULL, and those behind it.
 */
static void
release_chain(RelayQueue *queue, RelayMessage *message)
{
	while (message)
	{
		RelayMessage *next = message->behind;

		message->behind = NULL;
		message->state = RELAY_UNTRIED;
		relay_list_append(&queue->untried, message);
		message = next;
	}
}

/*
 * Return the first message of a message's key, or NULL.
 */
static RelayMessage *
find_first(const RelayQueue *queue, const RelayMessage *message)
{
	RelayMessage *first;

	first = queue->buckets[message->hash % RELAY_QUEUE_BUCKETS];
	while (first && !same_key(first, message))
		first = first->bucket_next;
	return first;
}

/*
 * Return the FNV-1a hash of topic and key.  A publisher can choose keys that
 * collide.  Each lookup then compares up to all messages that the relay holds.
 */
static uint32_t
hash_key(const RelayMessage *message)
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

/*
 * Return whether two messages with keys have the same topic and key.
 */
static bool
same_key(const RelayMessage *a, const RelayMessage *b)
{
	return a->hash == b->hash && strcmp(a->key, b->key) == 0 &&
		strcmp(a->topic, b->topic) == 0;
}
