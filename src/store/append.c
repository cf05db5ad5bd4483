/*-------------------------------------------------------------------------
 *
 * append.c
 *		Inserting rows whose keys are new by construction.
 *
 * The keys come from a sequence, so no other row can have them, and the
 * insertion need not be speculative.  Many rows are collected and inserted
 * some pages at a time, as COPY does.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/tableam.h"
#include "access/xact.h"
#include "miscadmin.h"

#include "store/internal.h"
#include "util/compat.h"

/* The maximum size of rows that are inserted together. */
#define MAX_SIZE_AT_ONCE	((Size) 64 * 1024)

static void flush_rows(IdemAppender *appender);
static void enter(IdemIndexes *indexes, TupleTableSlot *slot);
static void hint_at_sequence(void *arg);

/*
 * Insert a row whose key comes from a sequence.
 */
void
idem_append(IdemCursor *cursor, Datum *values, bool *nulls)
{
	IdemTable  *table = cursor->table;
	TupleTableSlot *slot = idem_new_row(table, values, nulls);
	IdemIndexes *indexes = idem_open_indexes(table);

	table_tuple_insert(table->rel, slot, GetCurrentCommandId(true), 0, NULL);
	IDEM_INJECTION_POINT("idem-append-heap");
	enter(indexes, slot);
	ExecClearTuple(slot);
	CommandCounterIncrement();
}

/*
 * Begin to insert many rows in the way of idem_append().  All of them are in
 * the table when idem_append_end() has returned.
 */
void
idem_append_begin(IdemAppender *appender, IdemCursor *cursor)
{
	IdemTable  *table = cursor->table;

	appender->table = table;
	appender->context = AllocSetContextCreate(table->context,
											  "idempotency rows",
											  ALLOCSET_DEFAULT_SIZES);
	appender->slots = MemoryContextAlloc(table->context, IDEM_APPEND_ROWS *
										 sizeof(TupleTableSlot *));
	appender->nslots = 0;
	appender->nrows = 0;
	appender->size = 0;
}

/*
 * Add a copy of a row.  If "nrows" is 0 afterwards, all rows that were added
 * are in the table.
 */
void
idem_append_add(IdemAppender *appender, Datum *values, bool *nulls)
{
	TupleTableSlot *slot;
	bool		shouldFree;
	MemoryContext old;

	old = MemoryContextSwitchTo(appender->table->context);
	if (appender->nrows == appender->nslots)
		appender->slots[appender->nslots++] =
			MakeSingleTupleTableSlot(RelationGetDescr(appender->table->rel),
									 &TTSOpsHeapTuple);
	slot = appender->slots[appender->nrows++];
	idem_fill_row(slot, appender->table, values, nulls);
	appender->size += ExecFetchSlotHeapTuple(slot, true, &shouldFree)->t_len;
	MemoryContextSwitchTo(old);
	if (appender->nrows == IDEM_APPEND_ROWS ||
		appender->size >= MAX_SIZE_AT_ONCE)
		flush_rows(appender);
}

void
idem_append_end(IdemAppender *appender)
{
	flush_rows(appender);
	for (int i = 0; i < appender->nslots; i++)
		ExecDropSingleTupleTableSlot(appender->slots[i]);
	pfree(appender->slots);
	MemoryContextDelete(appender->context);
	CommandCounterIncrement();
}

/*
 * Insert the collected rows.
 */
static void
flush_rows(IdemAppender *appender)
{
	IdemTable  *table = appender->table;
	IdemIndexes *indexes = idem_open_indexes(table);
	MemoryContext old;

	if (appender->nrows == 0)
		return;
	old = MemoryContextSwitchTo(appender->context);
	table_multi_insert(table->rel, appender->slots, appender->nrows,
					   GetCurrentCommandId(true), 0, NULL);
	IDEM_INJECTION_POINT("idem-append-heap");
	for (int i = 0; i < appender->nrows; i++)
	{
		CHECK_FOR_INTERRUPTS();
		enter(indexes, appender->slots[i]);
	}
	MemoryContextSwitchTo(old);
	MemoryContextReset(appender->context);
	appender->nrows = 0;
	appender->size = 0;
}

/*
 * Enter a new row into the indexes.  Raises 23505 if its key is not new.
 */
static void
enter(IdemIndexes *indexes, TupleTableSlot *slot)
{
	ErrorContextCallback callback;

	callback.callback = hint_at_sequence;
	callback.arg = NULL;
	callback.previous = error_context_stack;
	error_context_stack = &callback;
	idem_indexes_append(indexes, slot);
	error_context_stack = callback.previous;
}

/*
 * Error context callback: add a hint to a unique violation.  The server's
 * message names only the index, which might be the user's.
 */
static void
hint_at_sequence(void *arg)
{
	if (geterrcode() == ERRCODE_UNIQUE_VIOLATION)
		errhint("If it is the primary key, its sequence is behind the table, as after a restore without sequences: an administrator must call idem_raise_claim_tokens(0).");
}
