/*-------------------------------------------------------------------------
 *
 * config.h
 *		The configuration: settings, and the sections of the sinks.
 *
 *-------------------------------------------------------------------------
 */
#ifndef RELAY_CONFIG_H
#define RELAY_CONFIG_H

#include <stdbool.h>
#include <stdint.h>

typedef enum SettingKind
{
	SETTING_TEXT,
	SETTING_NUMBER,
	SETTING_BYTES,				/* "64MB" */
	SETTING_TIME,				/* "30s", kept in milliseconds */
	SETTING_BOOL
} SettingKind;

/* A setting that there is; a list of them ends with one without a name. */
typedef struct SettingDef
{
	const char *name;
	SettingKind kind;
	const char *standard;		/* its default; NULL: it has to be set */
	int64_t		min;
	int64_t		max;
	const char *help;
} SettingDef;

/* A setting that was made; "where" is the line or the option. */
typedef struct Setting
{
	char	   *name;
	char	   *value;
	char	   *where;
	struct Setting *next;
} Setting;

/* The settings above all sections, or those of a sink. */
typedef struct Section
{
	char	   *name;			/* NULL: above all */
	char	   *where;
	const SettingDef *defs[2];	/* what there is; the second may be NULL */
	Setting    *settings;
	struct Section *next;
} Section;

typedef struct Config
{
	Section    *main;
	int			nfaults;		/* each has been told */
} Config;

/* Settings of librdkafka are handed to it under this name. */
#define LIBRDKAFKA_PREFIX "librdkafka."

extern const SettingDef main_settings[];

extern Config *config_read(int argc, char **argv);
extern void config_free(Config *config);
extern void config_check(Config *config, Section *section);
extern void config_fault(Config *config, const char *where,
						 const char *format,...)
			__attribute__((format(printf, 3, 4)));

extern void config_check_certificates(Config *config, const Section *section,
									  const char *name);

extern const Setting *section_setting(const Section *section,
									  const char *name);
extern const char *section_where(const Section *section, const char *name);
extern const char *section_text(const Section *section, const char *name);
extern int64_t section_number(const Section *section, const char *name);

extern char **config_list(const char *text);
extern void config_free_list(char **list);

#endif							/* RELAY_CONFIG_H */
