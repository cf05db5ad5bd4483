/*-------------------------------------------------------------------------
 *
 * version.h
 *		The version of the relay, for --version and the webhooks' user agent.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RELAY_VERSION_H
#define IDEM_RELAY_VERSION_H

#define RELAY_VERSION "1.0"

#endif							/* IDEM_RELAY_VERSION_H */
