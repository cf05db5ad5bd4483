/*-------------------------------------------------------------------------
 *
 * client_text.h
 *		Can a client be sent a value?
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_CLIENT_TEXT_H
#define IDEMPOTENCY_CLIENT_TEXT_H

/*
 * How large a message's or a claim's documents can be, in bytes of text.
 */
#define IDEM_MAX_TEXT_SIZE		(256 * 1024 * 1024)

/*
 * A call returns no more bytes of them, unless it returns a single row, so that
 * its client gets them before it gives up.
 */
#define IDEM_MAX_RESULT_SIZE	(64 * 1024 * 1024)

extern bool idem_json_is_small(Datum json);
extern int64 idem_json_text_size(Datum json, int64 limit);
extern Datum idem_check_client_json(Datum json);
extern Datum idem_check_client_text(Datum value);

#endif							/* IDEMPOTENCY_CLIENT_TEXT_H */
