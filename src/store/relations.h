/*-------------------------------------------------------------------------
 *
 * relations.h
 *		The extension's relations, by name and by OID.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_RELATIONS_H
#define IDEMPOTENCY_RELATIONS_H

#include "storage/lockdefs.h"
#include "utils/relcache.h"

typedef enum IdemRelationId
{
	IDEM_KEYS,
	IDEM_KEYS_EXPIRES_AT,
	IDEM_KEYS_RESUMABLE,
	IDEM_KEYS_RESUMABLE_SCOPES,
	IDEM_CLAIM_TOKENS,
	IDEM_ACTION_VERSIONS,
	IDEM_USER_ACTIONS,
	IDEM_AGGREGATES,
	IDEM_CLIENT_SEQUENCES,
	IDEM_TOKENS,
	IDEM_TOKENS_EXPIRES_AT,
	IDEM_OUTBOX,
	IDEM_OUTBOX_IDS,
	IDEM_OUTBOX_DUE,
	IDEM_OUTBOX_TOPICS,
	IDEM_OUTBOX_LANES,
	IDEM_OUTBOX_ENDED,
} IdemRelationId;

#define IDEM_NUM_RELATIONS	(IDEM_OUTBOX_ENDED + 1)

/* The indexes of a table stand behind it in IdemRelationId. */
typedef enum IdemRelationKind
{
	IDEM_TABLE,
	IDEM_INDEX,
	IDEM_SEQUENCE,
} IdemRelationKind;

extern uint64 idem_relation_changes;
extern uint64 idem_contents_changes;

extern Relation idem_relation_open(IdemRelationId id, LOCKMODE lockmode);
extern void idem_relation_unlock(Oid relid, LOCKMODE lockmode);
extern const char *idem_relation_name(IdemRelationId id);
extern IdemRelationKind idem_relation_kind(IdemRelationId id);
extern int	idem_relation_columns(IdemRelationId id);
extern Oid	idem_sequence_oid(IdemRelationId id);
extern Relation idem_index_open(IdemRelationId id, Relation table);
extern bool idem_is_installed(void);

#endif							/* IDEMPOTENCY_RELATIONS_H */
