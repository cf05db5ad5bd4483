/*-------------------------------------------------------------------------
 *
 * signature.h
 *		Signatures of webhooks.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RELAY_SIGNATURE_H
#define IDEM_RELAY_SIGNATURE_H

/* Bytes of a signature as a string, with its final zero byte. */
#define RELAY_SIGNATURE_SIZE	64

extern int	relay_signature_read_secret(const char *string,
										unsigned char *secret, int size);
extern void relay_signature_make(const unsigned char *secret, int length,
								 const char *const *parts, int nparts,
								 char *signature);

#endif							/* IDEM_RELAY_SIGNATURE_H */
