/*-------------------------------------------------------------------------
 *
 * message.c
 *		Lists of messages.
 *
 * A message is in at most one of these lists, the list that belongs to its
 * state.  This file owns no state.  queue.c and answers.c call it.
 *
 *-------------------------------------------------------------------------
 */
#include "message.h"

/*
 * Append a message, which is in no list, to a list.
 */
void
relay_list_append(RelayMessageList *list, RelayMessage *message)
{
	message->next = NULL;
	message->prev = list->last;
	*(list->last ? &list->last->next : &list->first) = message;
	list->last = message;
	list->count++;
}

/*
 * Put a message, which is in no list, before all others of a list.
 */
void
relay_list_prepend(RelayMessageList *list, RelayMessage *message)
{
	message->prev = NULL;
	message->next = list->first;
	*(list->first ? &list->first->prev : &list->last) = message;
	list->first = message;
	list->count++;
}

/*
 * Remove a message from the list that it is in.
 */
void
relay_list_remove(RelayMessageList *list, RelayMessage *message)
{
	*(message->prev ? &message->prev->next : &list->first) = message->next;
	*(message->next ? &message->next->prev : &list->last) = message->prev;
	message->prev = message->next = NULL;
	list->count--;
}
