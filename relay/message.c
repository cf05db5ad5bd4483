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
	relay_list_insert(list, list->last, message);
}

/*
 * Insert a message, which is in no list, behind one of a list, or before all
 * others if that is NULL.
 */
void
relay_list_insert(RelayMessageList *list, RelayMessage *before,
				  RelayMessage *message)
{
	message->prev = before;
	message->next = before ? before->next : list->first;
	*(before ? &before->next : &list->first) = message;
	*(message->next ? &message->next->prev : &list->last) = message;
	list->count++;
	list->size += message->size;
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
	list->size -= message->size;
}
