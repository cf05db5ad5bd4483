/*-------------------------------------------------------------------------
 *
 * records.c
 *		Records of messages that have failed, in each sink.
 *
 * The records have a fixed size.  A message has its record in one of several
 * places, which belong to the remainder of its id.  If none of them is free, a
 * random one is replaced, so that of many bad messages some keep theirs and
 * end.
 *
 * Each RelaySink has its records.  sink.c writes them, and choice.c reads
 * them.
 *
 *-------------------------------------------------------------------------
 */
#include <stdlib.h>
#include <string.h>

#include "records.h"

static RelayRecord *find(RelayRecord *set, int64_t id);

/*
 * Return the record of a message, or NULL if it has none.
 */
RelayRecord *
relay_records_find(RelayRecords *records, int64_t id)
{
	return find(records->sets[id % RELAY_RECORD_SETS], id);
}

/*
 * Return the record of a message, which is empty if it had none.
 */
RelayRecord *
relay_records_get(RelayRecords *records, int64_t id)
{
	RelayRecord *set = records->sets[id % RELAY_RECORD_SETS];
	RelayRecord *record = find(set, id);

	if (record)
		return record;
	record = find(set, 0);
	if (!record)
		record = &set[lrand48() % RELAY_RECORD_PLACES];
	memset(record, 0, sizeof(RelayRecord));
	record->id = id;
	return record;
}

/*
 * Remove the record of a message, if it has one.
 */
void
relay_records_forget(RelayRecords *records, int64_t id)
{
	RelayRecord *record = relay_records_find(records, id);

	if (record)
		record->id = 0;
}

/*
 * Return the record of a set that has an id, or NULL.  The id 0 finds a record
 * that is free.
 */
static RelayRecord *
find(RelayRecord *set, int64_t id)
{
	int			i;

	for (i = 0; i < RELAY_RECORD_PLACES; i++)
	{
		if (set[i].id == id)
			return &set[i];
	}
	return NULL;
}
