/*-------------------------------------------------------------------------
 *
 * records.h
 *		Records of messages that have failed, in each sink.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RELAY_RECORDS_H
#define IDEM_RELAY_RECORDS_H

#include <stdbool.h>
#include <stdint.h>

#define RELAY_RECORD_SETS	1024	/* one for each remainder of an id */
#define RELAY_RECORD_PLACES	8	/* in a set */

/* Facts about a message that has failed. */
typedef struct RelayRecord
{
	int64_t		id;				/* 0: of no message */
	int			failures;		/* in a row */
	bool		alone;			/* it is only handed over alone */
	bool		is_bad;			/* others were delivered between failures */
	int64_t		since;			/* when it failed first */
	uint64_t	delivered;		/* of the sink, at the last failure */
	int64_t		backoff;
} RelayRecord;

typedef struct RelayRecords
{
	RelayRecord sets[RELAY_RECORD_SETS][RELAY_RECORD_PLACES];
} RelayRecords;

extern RelayRecord *relay_records_find(RelayRecords *records, int64_t id);
extern RelayRecord *relay_records_get(RelayRecords *records, int64_t id);
extern void relay_records_forget(RelayRecords *records, int64_t id);

#endif							/* IDEM_RELAY_RECORDS_H */
