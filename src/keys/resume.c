/*-------------------------------------------------------------------------
 *
 * resume.c
 *		idem_resume(): handing out unfinished requests to any number of workers.
 *
 * A claim that stored its request can be resumed when it has failed, or when
 * its lease has ended.  idem_resume() takes over such claims: it reads rows
 * through an index and replaces them, and never waits for another
 * transaction.
 *
 * Order.  The claims that have been resumable for the longest time come
 * first.  The indexes have the attempt before the time.  So claims with no
 * attempt left are never read, however many there are, and are found again
 * when idempotency.max_attempts is raised.  A call therefore reads one stream
 * of rows for each number of attempts (and for each scope that it names), and
 * always continues with the stream whose next row is the oldest.  Between two
 * rows it keeps only the position of a stream's next row.
 *
 * Compare and swap.  Under READ COMMITTED the streams are read with a dirty
 * snapshot, and rows that other transactions are writing are skipped.  Under
 * REPEATABLE READ and SERIALIZABLE they are read with a copy of the
 * transaction's snapshot.  A row is replaced only if it is still the version
 * that was read.  So two calls cannot take the same claim, and rows that
 * others have changed since are left to a later call.  The token is drawn
 * under the lock of the key, as in keys.c, so the tokens of a key ascend.
 *
 * Marks.  A scan skips rows that other transactions hold, and the entries of
 * claims that were resumed or completed since, until vacuum removes them.
 * There can be any number of both.  So under READ COMMITTED each backend
 * remembers for each stream where there is nothing to be found, as takes do
 * (see outbox/due_low_water.c): claims enter a stream at the current time, as
 * messages become available.
 *
 * Expired claims stay in the indexes until the cleanup deletes them.  To keep
 * each call from reading a flood of them, a call that finds more than
 * TOLERATED of them retires the next ones: it sets their resume_at to NULL,
 * which removes them from the indexes.  Like the claims that it returns, they
 * are locked until its transaction ends.  So their number is limited, and the
 * call ends there: it must commit before it reaches a time limit.
 *
 * A claim that this transaction itself holds is not resumable, even if its
 * lease has expired, because nobody else can have taken it.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/detoast.h"
#include "access/skey.h"
#include "access/stratnum.h"
#include "access/xact.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "keys/claim_holder.h"
#include "keys/key_record.h"
#include "keys/keys.h"
#include "outbox/due_low_water.h"
#include "stats/stats.h"
#include "store/key_lock.h"
#include "util/arguments.h"
#include "util/client_text.h"
#include "util/commit_notify.h"
#include "util/compat.h"
#include "util/settings.h"
#include "util/subtransaction.h"
#include "util/times.h"

/* The columns of idem_resume()'s result, in order. */
static const int resume_columns[] = {
	KEYS_SCOPE,
	KEYS_KEY,
	KEYS_CLAIM_TOKEN,
	KEYS_ATTEMPT,
	KEYS_REQUEST,
	KEYS_RECOVERY_POINT,
	KEYS_RECOVERY_STATE,
	KEYS_CREATED_AT,
	KEYS_LEASE_EXPIRES_AT,
};

#define DEFAULT_MAX_CLAIMS	10

/* The maximum number of a call's streams that have marks. */
#define MAX_MARKED		100

/*
 * A call leaves TOLERATED expired claims to the cleanup, and ends after it
 * has retired MAX_RETIRED others.
 */
#define TOLERATED		100
#define MAX_RETIRED		2000

/*
 * The maximum size of a result with more than one claim, in bytes of text.  A
 * worker that cannot receive a result rolls back, and the next one gets the
 * same claims, so a result must not be much larger than its largest claim.
 */
#define MAX_RESULT_SIZE	INT64CONST(4000000)

/*
 * Rows with one number of attempts, and of one scope if scopes are named, in
 * order of time.  "resume_at" and "tid" are the position of the next row.
 */
typedef struct Stream
{
	Datum		scope;			/* NULL pointer: all */
	int32		attempt;
	TimestampTz resume_at;
	ItemPointerData tid;

	/* The mark, which says which rows need not be looked at. */
	bool		is_marked;
	IdemDueScan marked;
	TimestampTz known_at;		/* position of the last row reported to it */
	ItemPointerData known_tid;
	bool		is_looking;		/* that row is still being looked at */
} Stream;

/* A call of idem_resume(). */
typedef struct Resuming
{
	IdemCursor	claims;			/* reads a stream */
	IdemCursor	attempts;		/* looks for numbers of attempts */
	Snapshot	snapshot;		/* NULL: dirty scans */
	TimestampTz now;
	bool		waits;
	TimestampTz next_due;		/* only if "waits" */
	Datum	   *scopes;			/* NULL: all */
	int			nscopes;
	const Interval *lease;
	int			wanted;			/* number of claims still wanted */
	int			taken;
	int			expired;		/* number of expired claims found */
	int			retired;		/* number of these that were retired */
	bool		ends;			/* it has retired enough */
	int64		text_size;		/* of the claims in the result */
	int64		found_size;		/* of the row that was found */
	Stream	   *streams;
	int			nstreams;
	int			max_streams;
	IdemBlockers blockers;		/* of the row that was found */
	ReturnSetInfo *result;
} Resuming;

static void resume_or_wait(Resuming *resuming, TimestampTz deadline);
static bool try_resume(void *arg);
static void resume(Resuming *resuming);
static void open_streams(Resuming *resuming);
static void begin_stream(Resuming *resuming, Stream *stream);
static bool next_attempt(Resuming *resuming, Datum scope, int32 *attempt);
static bool seek(Resuming *resuming, Stream *stream);
static bool advance(Resuming *resuming, Stream *stream);
static bool skips(Resuming *resuming, Stream *stream, TimestampTz *after);
static void looked(Resuming *resuming, Stream *stream);
static int	oldest_stream(const Resuming *resuming);
static bool is_resumable(Resuming *resuming);
static void retire(Resuming *resuming);
static void find_next_due(Resuming *resuming);
static void restart(Resuming *resuming, const Stream *stream,
					TimestampTz from, TimestampTz until);
static void scan_in_scope(Resuming *resuming, IdemCursor *cursor,
						  bool entries, Datum scope, ScanKey keys,
						  int nkeys);
static bool fits_result(Resuming *resuming);
static void take_over(Resuming *resuming);

/*
 * idem_resume(max_claims, lease, scopes, wait) -> setof row
 */
PG_FUNCTION_INFO_V1(idem_resume);
Datum
idem_resume(PG_FUNCTION_ARGS)
{
	Resuming	resuming = {0};
	Interval   *wait = idem_interval_arg(fcinfo, 3, "wait");
	TimestampTz start = GetCurrentTimestamp();
	TimestampTz deadline = idem_add_interval(start, wait, 0);

	resuming.wanted = PG_ARGISNULL(0) ? DEFAULT_MAX_CLAIMS :
		PG_GETARG_INT32(0);
	if (resuming.wanted < 1)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("argument \"%s\" must be positive", "max_claims")));
	resuming.lease = idem_interval_arg(fcinfo, 1, "lease");
	if (!PG_ARGISNULL(2))
		resuming.nscopes = idem_distinct_texts(PG_GETARG_DATUM(2), "scopes",
											   &resuming.scopes);
	InitMaterializedSRF(fcinfo, 0);
	resuming.result = (ReturnSetInfo *) fcinfo->resultinfo;

	resuming.waits = deadline > start;
	if (resuming.waits)
		resume_or_wait(&resuming, deadline);
	else
		resume(&resuming);
	return (Datum) 0;
}

/*
 * Take resumable claims, or sleep until there are some, or until "deadline".
 * A call that has retired claims also returns, so that its transaction can
 * commit that.
 *
 * A snapshot of REPEATABLE READ or SERIALIZABLE sees no new claims, so a
 * commit does not wake these calls.  They look again when a lease ends.
 */
static void
resume_or_wait(Resuming *resuming, TimestampTz deadline)
{
	bool		entered = IsolationUsesXactSnapshot();

	for (;;)
	{
		(void) idem_in_subtransaction(try_resume, resuming, NULL);
		if (resuming->taken > 0 || resuming->retired > 0 ||
			resuming->now >= deadline)
			break;
		if (entered)
			idem_await_change(resuming->next_due, deadline);
		else
		{
			Datum		key[2];

			idem_resumable_key(key, resuming->nscopes == 1 ?
							   resuming->scopes[0] : (Datum) 0);
			idem_await_claim(key);
		}
		entered = true;
	}
	idem_await_end();
}

/*
 * Take the claims that are resumable now.  If there are none, the
 * subtransaction is rolled back, so that the sleep holds no lock.
 */
static bool
try_resume(void *arg)
{
	Resuming   *resuming = arg;

	resume(resuming);
	return resuming->taken > 0 || resuming->retired > 0;
}

/*
 * Take the claims that are resumable now.  If there are none, a call that
 * waits finds out when there will be one.
 */
static void
resume(Resuming *resuming)
{
	int			current = -1;	/* the stream whose row is in claims.row */

	idem_cursor_open(&resuming->claims, IDEM_KEYS, RowExclusiveLock);
	idem_cursor_open_beside(&resuming->attempts, &resuming->claims);
	resuming->now = GetCurrentTimestamp();
	resuming->nstreams = 0;
	resuming->expired = 0;
	resuming->retired = 0;
	resuming->ends = false;

	/* The transaction's own snapshot would see what the call itself writes. */
	resuming->snapshot = NULL;
	if (IsolationUsesXactSnapshot())
	{
		PushCopiedSnapshot(GetTransactionSnapshot());
		resuming->snapshot = GetActiveSnapshot();
	}
	open_streams(resuming);
	IDEM_INJECTION_POINT("idem-resume-begun");

	while (resuming->wanted > 0 && resuming->nstreams > 0 && !resuming->ends)
	{
		int			i = oldest_stream(resuming);
		Stream	   *stream = &resuming->streams[i];
		ItemPointerData tid = stream->tid;
		bool		more = true;

		CHECK_FOR_INTERRUPTS();
		if (i != current)
			more = seek(resuming, stream);
		current = i;
		if (more && ItemPointerEquals(&stream->tid, &tid))
		{
			if (!fits_result(resuming))
				break;
			take_over(resuming);
			resuming->blockers.count = 0;
			looked(resuming, stream);
			more = resuming->wanted == 0 || advance(resuming, stream);
		}
		if (!more)
		{
			*stream = resuming->streams[--resuming->nstreams];
			current = -1;
		}
	}

	for (int i = 0; i < resuming->nstreams; i++)
	{
		if (resuming->streams[i].is_marked)
			idem_due_scan_end(&resuming->streams[i].marked, false);
	}
	if (resuming->waits && resuming->taken == 0)
		find_next_due(resuming);
	idem_cursor_close(&resuming->attempts);
	idem_cursor_close(&resuming->claims);
	if (resuming->snapshot != NULL)
		PopActiveSnapshot();
}

/*
 * Begin a stream for each number of attempts, in each scope, that has
 * resumable rows.
 */
static void
open_streams(Resuming *resuming)
{
	bool		all = resuming->scopes == NULL;

	for (int i = 0; i < (all ? 1 : resuming->nscopes); i++)
	{
		Stream		stream = {
			.scope = all ? (Datum) 0 : resuming->scopes[i],
		};

		while (next_attempt(resuming, stream.scope, &stream.attempt))
		{
			CHECK_FOR_INTERRUPTS();
			begin_stream(resuming, &stream);
			if (!seek(resuming, &stream))
				continue;
			if (resuming->nstreams == resuming->max_streams)
			{
				Size		size;

				resuming->max_streams = Max(8, resuming->max_streams * 2);
				size = resuming->max_streams * sizeof(Stream);
				resuming->streams = resuming->streams == NULL ?
					palloc(size) : repalloc_huge(resuming->streams, size);
			}
			resuming->streams[resuming->nstreams++] = stream;
		}
	}
}

/*
 * Begin a stream where there can be rows.  If its mark replaces that of
 * another stream, the other one continues without a mark.
 */
static void
begin_stream(Resuming *resuming, Stream *stream)
{
	TimestampTz after = DT_NOBEGIN;

	stream->is_marked = resuming->snapshot == NULL &&
		resuming->nstreams < MAX_MARKED;
	stream->known_at = DT_NOBEGIN;
	ItemPointerSet(&stream->known_tid, 0, 0);
	stream->is_looking = false;
	if (stream->is_marked)
		after = idem_due_scan_begin(&stream->marked,
									idem_due_hash(stream->scope,
												  stream->attempt),
									resuming->now);
	for (int i = 0; stream->is_marked && i < resuming->nstreams; i++)
	{
		Stream	   *other = &resuming->streams[i];

		if (other->is_marked && other->marked.mark == stream->marked.mark)
			other->is_marked = other->is_looking = false;
	}
	stream->resume_at = TIMESTAMP_IS_NOBEGIN(after) ? after : after + 1;
	ItemPointerSet(&stream->tid, 0, 0);
}

/*
 * Step to the next higher number of attempts of the rows of a scope.  Returns
 * false if there is none below idempotency.max_attempts.
 *
 * Under READ COMMITTED dead entries count, too, because a search for a row
 * might have to skip any number of them.  The stream is then found to be
 * empty.
 */
static bool
next_attempt(Resuming *resuming, Datum scope, int32 *attempt)
{
	ScanKeyData keys[3];
	IdemCursor *attempts = &resuming->attempts;
	Datum		value;
	bool		visible;

	idem_key_int4(&keys[0], 1, BTGreaterStrategyNumber, *attempt);
	idem_key_int4(&keys[1], 1, BTLessStrategyNumber, idem_max_attempts);
	if (resuming->snapshot == NULL)
	{
		AttrNumber	column = DatumGetPointer(scope) == NULL ? 1 : 2;

		scan_in_scope(resuming, attempts, true, scope, keys, 2);
		if (!idem_scan_entry(attempts, ForwardScanDirection, column, &value,
							 &visible))
			return false;
	}
	else
	{
		scan_in_scope(resuming, attempts, false, scope, keys, 2);
		if (!idem_scan_next(attempts, ForwardScanDirection))
			return false;
		value = attempts->row->tts_values[KEYS_ATTEMPT];
	}
	*attempt = DatumGetInt32(value);
	return true;
}

/*
 * Fetch the row at the position of a stream, or the first resumable one after
 * it.  Returns false if there is none.
 */
static bool
seek(Resuming *resuming, Stream *stream)
{
	Stream		position = *stream;

	restart(resuming, stream, stream->resume_at, resuming->now);
	do
	{
		if (!advance(resuming, stream))
			return false;
	} while (stream->resume_at == position.resume_at &&
			 ItemPointerCompare(&stream->tid, &position.tid) < 0);
	return true;
}

/*
 * Fetch the next resumable row of the stream that seek() was called for last.
 */
static bool
advance(Resuming *resuming, Stream *stream)
{
	IdemCursor *cursor = &resuming->claims;

	for (;;)
	{
		TimestampTz after;

		CHECK_FOR_INTERRUPTS();
		if (resuming->ends ||
			!idem_scan_next(cursor, ForwardScanDirection))
		{
			resuming->blockers.count = 0;
			looked(resuming, stream);
			if (stream->is_marked)
				idem_due_scan_end(&stream->marked, !resuming->ends);
			return false;
		}
		stream->resume_at =
			DatumGetTimestampTz(cursor->row->tts_values[KEYS_RESUME_AT]);
		stream->tid = cursor->row->tts_tid;
		if (skips(resuming, stream, &after))
		{
			restart(resuming, stream, after + 1, resuming->now);
			continue;
		}
		if (!TransactionIdIsValid(cursor->holder) &&
			idem_found_is_expired(cursor, resuming->now))
			retire(resuming);
		if (is_resumable(resuming))
			return true;

		resuming->blockers.count = 0;
		if (TransactionIdIsValid(cursor->holder))
			(void) idem_add_blocker(&resuming->blockers, cursor->holder);
		looked(resuming, stream);
	}
}

/*
 * Report the row to the mark of its stream, unless that knows the row.
 * Returns whether to continue after "after" instead.
 */
static bool
skips(Resuming *resuming, Stream *stream, TimestampTz *after)
{
	if (!stream->is_marked || stream->resume_at < stream->known_at ||
		(stream->resume_at == stream->known_at &&
		 ItemPointerCompare(&stream->tid, &stream->known_tid) <= 0))
		return false;

	/* Another session took the row before; nothing blocks it. */
	resuming->blockers.count = 0;
	looked(resuming, stream);
	if (idem_due_scan_found(&stream->marked, stream->resume_at,
							after) == IDEM_DUE_SKIP)
		return true;
	stream->known_at = stream->resume_at;
	stream->known_tid = stream->tid;
	stream->is_looking = true;
	return false;
}

/*
 * Report to the mark that the row it knows has been looked at, and waits for
 * resuming->blockers.
 */
static void
looked(Resuming *resuming, Stream *stream)
{
	if (stream->is_looking)
		idem_due_scan_looked(&stream->marked, &resuming->blockers);
	stream->is_looking = false;
}

/*
 * Return the stream whose next row is the oldest.
 */
static int
oldest_stream(const Resuming *resuming)
{
	int			oldest = 0;

	for (int i = 1; i < resuming->nstreams; i++)
	{
		if (resuming->streams[i].resume_at <
			resuming->streams[oldest].resume_at)
			oldest = i;
	}
	return oldest;
}

/*
 * Can the row that was found be taken over, as far as known without a lock?
 * A resume_at that is too early can only have been set by hand.
 */
static bool
is_resumable(Resuming *resuming)
{
	IdemCursor *cursor = &resuming->claims;
	Datum	   *values = cursor->row->tts_values;
	bool	   *nulls = cursor->row->tts_isnull;

	if (TransactionIdIsValid(cursor->holder) || nulls[KEYS_REQUEST] ||
		idem_found_is_expired(cursor, resuming->now))
		return false;
	switch (idem_found_state(cursor))
	{
		case IDEM_STATE_FAILED:
			return true;
		case IDEM_STATE_STARTED:
			return !idem_is_written_since(cursor, FirstCommandId) &&
				(nulls[KEYS_LEASE_EXPIRES_AT] ||
				 DatumGetTimestampTz(values[KEYS_LEASE_EXPIRES_AT]) <=
				 resuming->now);
		default:
			return false;
	}
}

/*
 * Called for an expired row: remove it from the indexes, unless another
 * session holds it.
 */
static void
retire(Resuming *resuming)
{
	IdemKeyRecord record;

	resuming->expired++;
	if (resuming->expired <= TOLERATED)
		return;
	memset(&record, 0, sizeof(record));
	idem_record_set_or_null(&record, KEYS_RESUME_AT, (Datum) 0);
	idem_record_keep(&record, &resuming->claims);
	if (idem_update(&resuming->claims, record.values, record.nulls,
					false) == IDEM_WRITE_DONE)
		resuming->retired++;
	resuming->ends = resuming->retired >= MAX_RETIRED;
}

/*
 * Set next_due to the time of the next resumable row; DT_NOEND if it is not
 * within IDEM_LOOK_AGAIN_MS, after which a waiter looks again anyway.
 */
static void
find_next_due(Resuming *resuming)
{
	TimestampTz until = idem_add_ms(resuming->now, IDEM_LOOK_AGAIN_MS);
	bool		all = resuming->scopes == NULL;

	resuming->next_due = DT_NOEND;
	for (int i = 0; i < (all ? 1 : resuming->nscopes); i++)
	{
		Stream		stream = {
			.scope = all ? (Datum) 0 : resuming->scopes[i],
		};

		while (next_attempt(resuming, stream.scope, &stream.attempt))
		{
			CHECK_FOR_INTERRUPTS();
			restart(resuming, &stream, resuming->now + 1, until);
			if (!idem_scan_next(&resuming->claims, ForwardScanDirection))
				continue;
			until = DatumGetTimestampTz(resuming->claims.row->tts_values[KEYS_RESUME_AT]);
			resuming->next_due = until;
		}
	}
}

/*
 * Begin to scan the rows of a stream that become resumable between two times.
 */
static void
restart(Resuming *resuming, const Stream *stream, TimestampTz from,
		TimestampTz until)
{
	ScanKeyData keys[4];

	idem_key_int4(&keys[0], 1, BTEqualStrategyNumber, stream->attempt);
	idem_key_time(&keys[1], 2, BTGreaterEqualStrategyNumber, from);
	idem_key_time(&keys[2], 2, BTLessEqualStrategyNumber, until);
	scan_in_scope(resuming, &resuming->claims, false, stream->scope, keys, 3);
}

/*
 * Scan the resumable claims of a scope, or of all, or their index entries.
 * The array must have space for another key.
 */
static void
scan_in_scope(Resuming *resuming, IdemCursor *cursor, bool entries,
			  Datum scope, ScanKey keys, int nkeys)
{
	IdemRelationId index = IDEM_KEYS_RESUMABLE;

	if (DatumGetPointer(scope) != NULL)
	{
		index = IDEM_KEYS_RESUMABLE_SCOPES;
		for (int i = 0; i < nkeys; i++)
			keys[i].sk_attno++;
		memmove(&keys[1], &keys[0], nkeys * sizeof(ScanKeyData));
		idem_key_text(&keys[0], 1, scope);
		nkeys++;
	}
	if (entries)
		idem_scan_entries(cursor, index, keys, nkeys);
	else
		idem_scan(cursor, index, resuming->snapshot, keys, nkeys);
}

/*
 * Does the row that was found fit into the result?  Sets found_size.
 */
static bool
fits_result(Resuming *resuming)
{
	Datum	   *found = resuming->claims.row->tts_values;
	int64		left = MAX_RESULT_SIZE - resuming->text_size;
	int64		size = idem_json_text_size(found[KEYS_REQUEST], left);

	if (!resuming->claims.row->tts_isnull[KEYS_RECOVERY_STATE])
		size += toast_raw_datum_size(found[KEYS_RECOVERY_STATE]);
	resuming->found_size = size;
	return size <= left || resuming->taken == 0;
}

/*
 * Take over the row that was found, and add it to the result, unless another
 * session holds it.
 */
static void
take_over(Resuming *resuming)
{
	IdemCursor *cursor = &resuming->claims;
	Datum	   *found = cursor->row->tts_values;
	IdemKeyLock lock = {0};
	IdemKeyRecord record;
	TimestampTz now;
	int64		token;
	IdemWrite	written = IDEM_WRITE_STALE;
	Datum		values[lengthof(resume_columns)];
	bool		nulls[lengthof(resume_columns)];

	if (!idem_key_lock(&lock, cursor, &found[KEYS_SCOPE]))
		return;
	token = idem_next_claim_token(DatumGetInt64(found[KEYS_CLAIM_TOKEN]));

	/* Drawing a token can wait, and the record expire meanwhile. */
	now = GetCurrentTimestamp();
	if (!idem_found_is_expired(cursor, now))
	{
		memset(&record, 0, sizeof(record));
		idem_record_set(&record, KEYS_CLAIM_TOKEN, Int64GetDatum(token));
		idem_record_set(&record, KEYS_STATE,
						idem_state_datum(IDEM_STATE_STARTED));
		idem_record_set(&record, KEYS_ATTEMPT,
						Int32GetDatum(DatumGetInt32(found[KEYS_ATTEMPT]) + 1));
		idem_record_set(&record, KEYS_LEASE_EXPIRES_AT,
						TimestampTzGetDatum(idem_add_interval(now, resuming->lease,
															  idem_default_lease)));
		idem_record_set_or_null(&record, KEYS_ERROR, (Datum) 0);
		idem_record_keep(&record, cursor);
		idem_record_set_resume_at(&record, IDEM_STATE_STARTED, now);
		written = idem_update(cursor, record.values, record.nulls, false);
	}
	idem_key_unlock(&lock);
	if (written != IDEM_WRITE_DONE)
		return;

	IDEM_INJECTION_POINT("idem-resumed");
	idem_remember_claim(token);
	idem_count(IDEM_COUNT_CLAIMS + IDEM_CLAIM_NEW, 1);
	idem_count(IDEM_COUNT_TAKEOVERS, 1);
	idem_log_key_event(IDEM_EVENT_TAKEN_OVER, record.values);
	for (int i = 0; i < lengthof(resume_columns); i++)
	{
		values[i] = record.values[resume_columns[i]];
		nulls[i] = record.nulls[resume_columns[i]];
	}
	tuplestore_putvalues(resuming->result->setResult,
						 resuming->result->setDesc, values, nulls);
	resuming->text_size += resuming->found_size;
	resuming->taken++;
	resuming->wanted--;
}
