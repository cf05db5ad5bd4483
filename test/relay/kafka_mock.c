/*-------------------------------------------------------------------------
 *
 * kafka_mock.c
 *		librdkafka's mock cluster, for the relay's test.
 *
 *		kafka_mock TOPIC ...
 *
 * Prints the address of its brokers, then a line for each message that is
 * written to a topic: topic, partition, key, message_id and value, with tabs.
 * Reads commands from standard input, and ends with it:
 *
 *		down, up		the brokers
 *		moved			the next three writes are for another leader
 *		noleader		makes a topic "leaderless"
 *
 *-------------------------------------------------------------------------
 */
#include <librdkafka/rdkafka.h>
#include <librdkafka/rdkafka_mock.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BROKERS		2
#define PARTITIONS	4

#define PRODUCE		0			/* the number of the request that writes */

static rd_kafka_t *make_client(rd_kafka_type_t type, const char *const *conf);
static void obey(rd_kafka_mock_cluster_t *cluster, const char *command);
static void print_message(const rd_kafka_message_t *message);

int
main(int argc, char **argv)
{
	static const char *const none[] = {NULL};
	rd_kafka_t *host = make_client(RD_KAFKA_PRODUCER, none);
	rd_kafka_mock_cluster_t *cluster = rd_kafka_mock_cluster_new(host, BROKERS);
	const char *brokers = rd_kafka_mock_cluster_bootstraps(cluster);
	const char *const conf[] = {
		"bootstrap.servers", brokers, "group.id", "test",
		"auto.offset.reset", "earliest", "fetch.wait.max.ms", "10",
		"isolation.level", "read_uncommitted",
		"reconnect.backoff.max.ms", "500", NULL
	};
	rd_kafka_t *consumer = make_client(RD_KAFKA_CONSUMER, conf);
	rd_kafka_topic_partition_list_t *all =
		rd_kafka_topic_partition_list_new(argc * PARTITIONS);
	struct pollfd input = {.fd = 0,.events = POLLIN};
	char		command[256];
	int			i;
	int			partition;

	setvbuf(stdout, NULL, _IOLBF, 0);
	rd_kafka_poll_set_consumer(consumer);
	for (i = 1; i < argc; i++)
	{
		rd_kafka_mock_topic_create(cluster, argv[i], PARTITIONS, 1);
		for (partition = 0; partition < PARTITIONS; partition++)
			rd_kafka_topic_partition_list_add(all, argv[i], partition)->offset =
				RD_KAFKA_OFFSET_BEGINNING;
	}
	rd_kafka_assign(consumer, all);
	puts(brokers);
	for (;;)
	{
		rd_kafka_message_t *message = rd_kafka_consumer_poll(consumer, 20);

		if (message)
		{
			if (!message->err)
				print_message(message);
			rd_kafka_message_destroy(message);
		}
		if (poll(&input, 1, 0) > 0)
		{
			if (!fgets(command, sizeof(command), stdin))
				break;
			obey(cluster, command);
		}
	}
	rd_kafka_topic_partition_list_destroy(all);
	/* What is not closed ends with the process. */
	fflush(stdout);
	_Exit(0);
}

static rd_kafka_t *
make_client(rd_kafka_type_t type, const char *const *conf)
{
	rd_kafka_conf_t *settings = rd_kafka_conf_new();
	char		why[512];
	rd_kafka_t *client;

	for (; *conf; conf += 2)
	{
		if (rd_kafka_conf_set(settings, conf[0], conf[1], why, sizeof(why)))
		{
			fprintf(stderr, "%s\n", why);
			exit(1);
		}
	}
	client = rd_kafka_new(type, settings, why, sizeof(why));
	if (!client)
	{
		fprintf(stderr, "%s\n", why);
		exit(1);
	}
	return client;
}

static void
obey(rd_kafka_mock_cluster_t *cluster, const char *command)
{
	int			broker;
	int			partition;

	if (strncmp(command, "moved", 5) == 0)
	{
		rd_kafka_mock_push_request_errors(cluster, PRODUCE, 3,
										  RD_KAFKA_RESP_ERR_NOT_LEADER_FOR_PARTITION,
										  RD_KAFKA_RESP_ERR_NOT_LEADER_FOR_PARTITION,
										  RD_KAFKA_RESP_ERR_NOT_LEADER_FOR_PARTITION);
		return;
	}
	if (strncmp(command, "noleader", 8) == 0)
	{
		for (partition = 0; partition < PARTITIONS; partition++)
			rd_kafka_mock_partition_set_leader(cluster, "leaderless",
											   partition, -1);
		return;
	}
	for (broker = 1; broker <= BROKERS; broker++)
	{
		if (strncmp(command, "down", 4) == 0)
			rd_kafka_mock_broker_set_down(cluster, broker);
		else
			rd_kafka_mock_broker_set_up(cluster, broker);
	}
}

static void
print_message(const rd_kafka_message_t *message)
{
	rd_kafka_headers_t *headers;
	const void *id = "";
	size_t		size = 0;

	if (!rd_kafka_message_headers(message, &headers))
		rd_kafka_header_get_last(headers, "message_id", &id, &size);
	printf("%s\t%d\t%.*s\t%.*s\t%.*s\n", rd_kafka_topic_name(message->rkt),
		   (int) message->partition, (int) message->key_len,
		   message->key ? (const char *) message->key : "", (int) size,
		   (const char *) id, (int) message->len,
		   (const char *) message->payload);
}
