--
-- The table of docs/reference.md that has a line for each function, as the
-- temporary table glance, and what raised an error that is in none of its
-- lines.  The caller has a table "errors" of the calls that it has seen fail.
--
CREATE TEMP TABLE glance_lines (
	line text
);
\copy glance_lines FROM PROGRAM 'sed -n "/^## At a glance/,/^## Request/s/^| .idem_/&/p" docs/reference.md' (DELIMITER E'\001')
CREATE TEMP TABLE glance AS
	SELECT trim('` ' FROM c[2]) AS name, trim(c[3]) AS who,
		trim(c[4]) AS read_only, trim(c[5]) AS holds, trim(c[6]) AS waits_for,
		regexp_split_to_array(trim(c[7]), ', ') AS errors
	FROM (SELECT string_to_array(line, '|') AS c FROM glance_lines) AS l;

-- Errors that the page states once for all functions, for those that write,
-- and for those that wait; and text that is not JSON, which fails before the
-- call.
CREATE TEMP VIEW unsaid_errors AS
	SELECT DISTINCT e.call, e.sqlstate
	FROM errors AS e JOIN glance AS g ON g.name = split_part(e.call, '(', 1)
	WHERE NOT (e.sqlstate = ANY (g.errors)
		OR e.sqlstate IN ('22008', '40001', '42501', '42704', '55000')
		OR e.sqlstate = '25006' AND g.read_only = '25006'
		OR e.sqlstate IN ('40P01', '55P03', '57014') AND g.waits_for <> 'nobody'
		OR e.sqlstate = '22P02' AND e.call LIKE '%{Location}%');
