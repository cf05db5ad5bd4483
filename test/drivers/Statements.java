/* The statements of docs/drivers.md with JDBC, on the database that the first argument names. */

import java.sql.*;
import java.util.Arrays;

class Statements
{
	static final String CLAIM = "SELECT outcome, claim_token, response_status, response_headers, response_body, recovery_point "
		+ "FROM idem_claim(?::text, ?::text, idem_request_hash(?::text, ?::text, ?::text), "
		+ "wait => make_interval(secs => ?::float8))";
	static final String COMPLETE = "SELECT idem_complete(?::text, ?::text, ?::int, ?::text, ?::text::json, ?::bigint)";
	static final String COMPLETE_BYTES = "SELECT idem_complete(?::text, ?::text, ?::int, ?::bytea)";
	static final String PUBLISH = "SELECT idem_publish(?::text, ?::text::jsonb, ?::text) AS message_id";
	static final String ONCE = "SELECT token FROM idem_once_many(?::text, ?::text[]) AS token";

	static Connection connection;

	static ResultSet query(String sql, Object... values) throws SQLException
	{
		PreparedStatement statement = connection.prepareStatement(sql);
		for (int i = 0; i < values.length; i++)
			statement.setObject(i + 1, values[i]);
		ResultSet rows = statement.executeQuery();
		rows.next();
		return rows;
	}

	static ResultSet claim(String key, String body) throws SQLException
	{
		return query(CLAIM, "customer-7", key, "POST", "/orders", body, 5.0);
	}

	static void check(String name, Object found, Object wanted)
	{
		System.out.println((wanted.equals(found) ? "ok" : "not ok") + " - JDBC: " + name);
		if (!wanted.equals(found))
			System.out.println("# " + found + " instead of " + wanted);
	}

	public static void main(String[] arguments) throws Exception
	{
		connection = DriverManager.getConnection(arguments[0]);
		connection.setAutoCommit(false);
		check("a new claim", claim("jdbc-order-0000001", "{\"sku\": \"teapot\"}").getString(1), "new");
		query(COMPLETE, "customer-7", "jdbc-order-0000001", 201, "{\"order\": 1}", "{\"Content-Type\": \"application/json\"}", null);
		check("a message has an id", query(PUBLISH, "orders", "{\"order\": 1}", "customer-7").getString(1).length(), 36);
		connection.commit();
		ResultSet again = claim("jdbc-order-0000001", "{ \"sku\": \"teapot\" }");
		check("a replay", again.getString(1) + again.getInt(3) + again.getString(5), "replay201{\"order\": 1}");
		claim("jdbc-order-0000002", "{}");
		query(COMPLETE_BYTES, "customer-7", "jdbc-order-0000002", 200, new byte[] {0, -1});
		connection.commit();
		check("bytes", Arrays.toString(query("SELECT response_bytes FROM idem_lookup(?::text, ?::text)", "customer-7",
			"jdbc-order-0000002").getBytes(1)), "[0, -1]");
		ResultSet tokens = query(ONCE, "mails", connection.createArrayOf("text", new String[] {"j1", "j2", "j1"}));
		String first = tokens.getString(1);
		tokens.next();
		check("a list is an array", first + tokens.getString(1) + tokens.next(), "j1j2false");
		connection.commit();
		try
		{
			claim("short", "{}");
		}
		catch (SQLException error)
		{
			check("the SQLSTATE", error.getSQLState(), "ID001");
		}
	}
}
