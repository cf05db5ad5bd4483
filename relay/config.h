/*-------------------------------------------------------------------------
 *
 * config.h
 *		The configuration: settings in sections.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RELAY_CONFIG_H
#define IDEM_RELAY_CONFIG_H

#include <stdbool.h>
#include <stdint.h>

#include "log.h"

typedef enum RelaySettingKind
{
	RELAY_TEXT,
	RELAY_NUMBER,
	RELAY_BYTES,				/* such as "64MB" */
	RELAY_TIME,					/* such as "30s"; kept in milliseconds */
	RELAY_BOOL
} RelaySettingKind;

/* A setting that exists.  An array of them ends with a NULL name. */
typedef struct RelaySettingDef
{
	const char *name;
	RelaySettingKind kind;
	const char *standard;		/* the default; NULL: required */
	const char *help;
	int64_t		min;
	int64_t		max;
} RelaySettingDef;

/* A setting that is set. */
typedef struct RelaySetting
{
	char	   *name;
	char	   *value;
	char	   *where;			/* the line or the option, for messages */
	struct RelaySetting *next;
} RelaySetting;

/* The settings of a sink, or those before all sections. */
typedef struct RelaySection
{
	char	   *name;			/* NULL: before all sections */
	char	   *where;			/* where its name is set */
	const RelaySettingDef *defs[2]; /* what exists; each can be NULL */
	RelaySetting *settings;
	struct RelaySection *next;
} RelaySection;

typedef struct RelayConfig
{
	RelaySection *main;			/* before all sections; the others follow */
	int			nfaults;		/* each is logged */
} RelayConfig;

/* Like relay_config_fault(), at the place of a setting or its section. */
#define relay_section_fault(config, section, name, ...) \
	relay_config_fault(config, relay_section_where(section, name), __VA_ARGS__)

/* The Kafka sink passes settings with this prefix to librdkafka. */
#define RELAY_LIBRDKAFKA_PREFIX "librdkafka."

extern const RelaySettingDef relay_main_settings[];

extern RelayConfig *relay_config_read(int argc, char **argv, int copy);
extern void relay_config_free(RelayConfig *config);
extern void relay_config_check(RelayConfig *config,
							   const RelaySection *section);
extern void relay_config_check_certificates(RelayConfig *config,
											const RelaySection *section,
											const char *name);
extern char *relay_config_pauses(RelayConfig *config,
								 const RelaySection *section,
								 const char *name);
extern void relay_config_fault(RelayConfig *config, const char *where,
							   const char *format,...) RELAY_FORMAT(3, 4);
extern void relay_config_read_secret(RelayConfig *config,
									 RelaySection *section, const char *name);
extern char **relay_config_list(const char *value);
extern void relay_config_free_list(char **list);

extern const RelaySetting *relay_section_setting(const RelaySection *section,
												 const char *name);
extern const char *relay_section_where(const RelaySection *section,
									   const char *name);
extern const char *relay_section_text(const RelaySection *section,
									  const char *name);
extern int64_t relay_section_number(const RelaySection *section,
									const char *name);

#endif							/* IDEM_RELAY_CONFIG_H */
