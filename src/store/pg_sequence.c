/*-------------------------------------------------------------------------
 *
 * pg_sequence.c
 *		The numbers that the extension's sequences give.
 *
 * nextval() draws a number.  This file also raises a sequence while other
 * sessions draw from it, and never lowers it.  setval() cannot do that:
 * between reading and setting, others might draw beyond the new value, and
 * their numbers would be given again.  So here reading, comparing and setting
 * are one step under the lock of the sequence's page, which is held no longer
 * than by nextval().  As with nextval(), a rollback does not undo it.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/relation.h"
#include "access/xact.h"
#include "access/xloginsert.h"
#include "commands/sequence.h"
#include "miscadmin.h"
#include "storage/bufmgr.h"
#include "utils/rel.h"

#include "store/pg_sequence.h"
#include "util/compat.h"

/* The one row of a sequence, in its locked page. */
typedef struct SequenceRow
{
	Relation	rel;
	Buffer		buffer;
	HeapTupleHeader tuple;
	int			length;
	Form_pg_sequence_data data;
} SequenceRow;

static void open_row(SequenceRow *row, IdemRelationId sequence, int lockmode);
static int64 last_number(SequenceRow *row);
static void write_row(SequenceRow *row, int64 last);
static void close_row(SequenceRow *row);

/*
 * Draw a number.  Raises 2200H if there is none left.  Like the functions
 * below, also raises the errors of idem_sequence_oid().
 */
int64
idem_sequence_next(IdemRelationId sequence)
{
	return nextval_internal(idem_sequence_oid(sequence), false);
}

/*
 * Return a number up to which no number will be drawn any more.
 */
int64
idem_sequence_last(IdemRelationId sequence)
{
	SequenceRow row;
	int64		last;

	open_row(&row, sequence, BUFFER_LOCK_SHARE);
	last = last_number(&row);
	close_row(&row);
	return last;
}

/*
 * Raise the sequence so that all numbers drawn from now on are above
 * "at_least", which is at most IDEM_MAX_RAISE.  Returns the number that they
 * are above.
 */
int64
idem_sequence_raise(IdemRelationId sequence, int64 at_least)
{
	SequenceRow row;
	int64		last;

	Assert(at_least <= IDEM_MAX_RAISE);

	/*
	 * With a transaction id, the commit flushes the WAL, and no number is
	 * used without it.
	 */
	(void) GetTopTransactionId();

	open_row(&row, sequence, BUFFER_LOCK_EXCLUSIVE);
	last = last_number(&row);
	if (last < at_least)
	{
		write_row(&row, at_least);
		last = at_least;
	}
	close_row(&row);
	return last;
}

/*
 * Open a sequence and lock its page.
 */
static void
open_row(SequenceRow *row, IdemRelationId sequence, int lockmode)
{
	Page		page;
	ItemId		item;

	row->rel = relation_open(idem_sequence_oid(sequence), NoLock);
	row->buffer = ReadBuffer(row->rel, 0);
	LockBuffer(row->buffer, lockmode);
	page = BufferGetPage(row->buffer);
	item = PageGetItemId(page, FirstOffsetNumber);
	if (!ItemIdIsNormal(item))
		elog(ERROR, "sequence \"%s\" has no row",
			 RelationGetRelationName(row->rel));
	row->tuple = (HeapTupleHeader) PageGetItem(page, item);
	row->length = ItemIdGetLength(item);
	row->data = (Form_pg_sequence_data)
		((char *) row->tuple + row->tuple->t_hoff);
}

static int64
last_number(SequenceRow *row)
{
	return row->data->last_value - (row->data->is_called ? 0 : 1);
}

/*
 * Write the last number as setval() does.
 */
static void
write_row(SequenceRow *row, int64 last)
{
	START_CRIT_SECTION();
	row->data->last_value = last;
	row->data->is_called = true;
	row->data->log_cnt = 0;
	MarkBufferDirty(row->buffer);

	if (RelationNeedsWAL(row->rel))
	{
		xl_seq_rec	record;
		XLogRecPtr	end;

		record.locator = row->rel->rd_locator;
		XLogBeginInsert();
		XLogRegisterBuffer(0, row->buffer, REGBUF_WILL_INIT);
		XLogRegisterData((char *) &record, sizeof(record));
		XLogRegisterData((char *) row->tuple, row->length);
		end = XLogInsert(RM_SEQ_ID, XLOG_SEQ_LOG);
		PageSetLSN(BufferGetPage(row->buffer), end);
	}
	END_CRIT_SECTION();
}

/*
 * Release the page.  The sequence's lock stays until the transaction ends, as
 * after nextval().
 */
static void
close_row(SequenceRow *row)
{
	UnlockReleaseBuffer(row->buffer);
	relation_close(row->rel, NoLock);
}
