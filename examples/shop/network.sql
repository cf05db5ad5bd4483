-- 500 users click a like button.  The network sends each click one to three
-- times, and shuffles what comes from ten users.

SELECT setseed(0.5) \g /dev/null

CREATE TABLE clicks AS
	SELECT 'user-' || u AS user_id, u / 10 AS part, n % 2 = 1 AS liked,
		1700000000000 + u * 1000 + n AS action_id
	FROM generate_series(1, 500) AS u, generate_series(1, 1 + u % 7) AS n;

CREATE TABLE network AS
	SELECT row_number() OVER (ORDER BY part, random()) AS arrival,
		user_id, liked, action_id
	FROM clicks, generate_series(1, 1 + action_id % 3);
-- They are dealt to 8 connections: drop what does not come out even.
DELETE FROM network WHERE arrival > (SELECT count(*) / 8 * 8 FROM network);
ALTER TABLE network ADD PRIMARY KEY (arrival);
CREATE SEQUENCE arrivals;
GRANT SELECT ON network TO shop_app;
GRANT USAGE ON arrivals TO shop_app;

-- The intent of each user: the last click.
CREATE TABLE intents AS
	SELECT DISTINCT ON (user_id) user_id, liked AS intended
	FROM network ORDER BY user_id, action_id DESC;

-- Two ways to get it wrong: flip the state, or let the last to arrive win.
CREATE TABLE toggled (user_id text PRIMARY KEY, liked boolean, requests int);
CREATE TABLE overwritten (LIKE toggled INCLUDING ALL);
GRANT SELECT, INSERT, UPDATE ON toggled, overwritten TO shop_app;
