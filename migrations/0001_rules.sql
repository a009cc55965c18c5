-- Rules, plans, tenants, API keys, and what has changed when and by whom.
--
-- A row of rate_limit_rule is one promise: this tenant on this route. '*' stands for any tenant or any
-- route. The rate is refill_per_second tokens in per_seconds seconds, so that 5 a minute is (5, 60).

CREATE TABLE rate_limit_rule (
    id                          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant_id                   text NOT NULL CHECK (tenant_id <> ''),
    route_id                    text NOT NULL CHECK (route_id <> ''),
    capacity                    bigint NOT NULL CHECK (capacity > 0),
    refill_per_second           bigint NOT NULL CHECK (refill_per_second > 0),
    per_seconds                 bigint NOT NULL DEFAULT 1 CHECK (per_seconds > 0),
    -- enforce refuses; shadow decides and counts, and never refuses; off does nothing
    mode                        text NOT NULL DEFAULT 'enforce' CHECK (mode IN ('enforce', 'shadow', 'off')),
    -- the share of subjects that `enforce` holds for; for the others it is `shadow`
    enforce_percent             bigint NOT NULL DEFAULT 100 CHECK (enforce_percent BETWEEN 0 AND 100),
    on_store_failure            text CHECK (on_store_failure IN ('local', 'allow', 'deny')),
    -- a rule to be tried beside this one: decided and counted, never enforced
    candidate_capacity          bigint CHECK (candidate_capacity > 0),
    candidate_refill_per_second bigint CHECK (candidate_refill_per_second > 0),
    candidate_per_seconds       bigint NOT NULL DEFAULT 1 CHECK (candidate_per_seconds > 0),
    -- outside of this time the row does not exist, and what is next in line holds
    valid_from                  timestamptz,
    valid_until                 timestamptz,
    updated_at                  timestamptz NOT NULL DEFAULT now(),
    UNIQUE (tenant_id, route_id),
    CHECK ((candidate_capacity IS NULL) = (candidate_refill_per_second IS NULL)),
    CHECK (valid_until > valid_from)
);

-- What a tenant of a plan is held to where it has no row of its own.
CREATE TABLE plan_rules (
    id                          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    plan                        text NOT NULL CHECK (plan NOT IN ('', '*')),
    route_id                    text NOT NULL CHECK (route_id <> ''),
    capacity                    bigint NOT NULL CHECK (capacity > 0),
    refill_per_second           bigint NOT NULL CHECK (refill_per_second > 0),
    per_seconds                 bigint NOT NULL DEFAULT 1 CHECK (per_seconds > 0),
    mode                        text NOT NULL DEFAULT 'enforce' CHECK (mode IN ('enforce', 'shadow', 'off')),
    enforce_percent             bigint NOT NULL DEFAULT 100 CHECK (enforce_percent BETWEEN 0 AND 100),
    on_store_failure            text CHECK (on_store_failure IN ('local', 'allow', 'deny')),
    candidate_capacity          bigint CHECK (candidate_capacity > 0),
    candidate_refill_per_second bigint CHECK (candidate_refill_per_second > 0),
    candidate_per_seconds       bigint NOT NULL DEFAULT 1 CHECK (candidate_per_seconds > 0),
    valid_from                  timestamptz,
    valid_until                 timestamptz,
    updated_at                  timestamptz NOT NULL DEFAULT now(),
    UNIQUE (plan, route_id),
    CHECK ((candidate_capacity IS NULL) = (candidate_refill_per_second IS NULL)),
    CHECK (valid_until > valid_from)
);

CREATE TABLE tenants (
    id         text PRIMARY KEY CHECK (id NOT IN ('', '*')),
    plan       text,
    status     text NOT NULL DEFAULT 'active' CHECK (status IN ('active', 'suspended')),
    updated_at timestamptz NOT NULL DEFAULT now()
);

-- A key itself is nowhere: only its HMAC-SHA-256 under the hash_secret of the gateways.
CREATE TABLE api_keys (
    id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    key_hash   bytea NOT NULL UNIQUE CHECK (octet_length(key_hash) = 32),
    tenant     text NOT NULL CHECK (tenant NOT IN ('', '*')),
    note       text,
    created_at timestamptz NOT NULL DEFAULT now(),
    revoked_at timestamptz,
    updated_at timestamptz NOT NULL DEFAULT now()
);

-- One version per transaction that changed something. `at` is its start: beside it a transaction id is
-- unique also where a dump was restored into another cluster.
CREATE TABLE rule_versions (
    version bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    xid     xid8 NOT NULL DEFAULT pg_current_xact_id(),
    at      timestamptz NOT NULL DEFAULT now(),
    who     text NOT NULL,
    what    text,
    UNIQUE (xid, at)
);

-- Each row that a version changed, before and after. Gateways look here for what is new: by xid, since
-- transactions do not end in the order in which they took their numbers.
CREATE TABLE rule_changes (
    id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    version bigint NOT NULL,
    xid     xid8 NOT NULL DEFAULT pg_current_xact_id(),
    source  text NOT NULL,
    row_id  text NOT NULL,
    before  jsonb,
    after   jsonb
);
CREATE INDEX rule_changes_xid ON rule_changes (xid);
CREATE INDEX rule_changes_version ON rule_changes (version);

CREATE FUNCTION tollgate_touch() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.updated_at := now();
    RETURN NEW;
END $$;

-- The version of this transaction: made by its first change.
CREATE FUNCTION tollgate_version() RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    known bigint;
BEGIN
    SELECT version INTO known FROM rule_versions WHERE xid = pg_current_xact_id() AND at = now();
    IF known IS NULL THEN
        INSERT INTO rule_versions (who, what) VALUES (
            coalesce(nullif(current_setting('tollgate.who', true), ''), session_user::text),
            nullif(current_setting('tollgate.what', true), ''))
        RETURNING version INTO known;
        PERFORM pg_notify('tollgate_rules', known::text);
    END IF;
    RETURN known;
END $$;

-- Per statement, not per row: half a million rows in one INSERT are one. What changes nothing is no
-- change. SECURITY DEFINER, so that whoever may write a rule need not be allowed to write history.
CREATE FUNCTION tollgate_log() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        IF EXISTS (SELECT FROM new_rows) THEN
            INSERT INTO rule_changes (version, source, row_id, after)
            SELECT (SELECT tollgate_version()), TG_TABLE_NAME, n.id::text, pg_catalog.to_jsonb(n) FROM new_rows n;
        END IF;
    ELSIF TG_OP = 'UPDATE' THEN
        IF EXISTS (SELECT FROM old_rows o FULL JOIN new_rows n USING (id)
                   WHERE pg_catalog.to_jsonb(o) - 'updated_at' IS DISTINCT FROM pg_catalog.to_jsonb(n) - 'updated_at') THEN
            INSERT INTO rule_changes (version, source, row_id, before, after)
            SELECT (SELECT tollgate_version()), TG_TABLE_NAME, id::text,
                   CASE WHEN o IS DISTINCT FROM NULL THEN pg_catalog.to_jsonb(o) END,
                   CASE WHEN n IS DISTINCT FROM NULL THEN pg_catalog.to_jsonb(n) END
            FROM old_rows o FULL JOIN new_rows n USING (id)
            WHERE pg_catalog.to_jsonb(o) - 'updated_at' IS DISTINCT FROM pg_catalog.to_jsonb(n) - 'updated_at';
        END IF;
    ELSIF TG_OP = 'DELETE' THEN
        IF EXISTS (SELECT FROM old_rows) THEN
            INSERT INTO rule_changes (version, source, row_id, before)
            SELECT (SELECT tollgate_version()), TG_TABLE_NAME, o.id::text, pg_catalog.to_jsonb(o) FROM old_rows o;
        END IF;
    ELSE -- TRUNCATE tells no rows: they are deleted one by one before it.
        EXECUTE pg_catalog.format('DELETE FROM %I.%I', TG_TABLE_SCHEMA, TG_TABLE_NAME);
    END IF;
    RETURN NULL;
END $$;

-- Whoever fires a trigger need not be allowed to call its function; and nobody's temporary tables stand
-- in the place of these.
REVOKE EXECUTE ON FUNCTION tollgate_log(), tollgate_version(), tollgate_touch() FROM PUBLIC;

DO $$
DECLARE
    name text;
BEGIN
    EXECUTE format('ALTER FUNCTION tollgate_log() SET search_path = %I, pg_temp', current_schema());
    FOREACH name IN ARRAY ARRAY['rate_limit_rule', 'plan_rules', 'tenants', 'api_keys'] LOOP
        EXECUTE format('CREATE TRIGGER touch BEFORE UPDATE ON %I FOR EACH ROW
                        WHEN (OLD.* IS DISTINCT FROM NEW.*) EXECUTE FUNCTION tollgate_touch()', name);
        EXECUTE format('CREATE TRIGGER log_insert AFTER INSERT ON %I REFERENCING NEW TABLE AS new_rows
                        FOR EACH STATEMENT EXECUTE FUNCTION tollgate_log()', name);
        EXECUTE format('CREATE TRIGGER log_update AFTER UPDATE ON %I REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows
                        FOR EACH STATEMENT EXECUTE FUNCTION tollgate_log()', name);
        EXECUTE format('CREATE TRIGGER log_delete AFTER DELETE ON %I REFERENCING OLD TABLE AS old_rows
                        FOR EACH STATEMENT EXECUTE FUNCTION tollgate_log()', name);
        EXECUTE format('CREATE TRIGGER log_truncate BEFORE TRUNCATE ON %I
                        FOR EACH STATEMENT EXECUTE FUNCTION tollgate_log()', name);
    END LOOP;
END $$;

-- Puts the rules of tenants and plans back to what they were right after version `target`. That is a
-- change like any other, and so a version itself. Tenants and API keys stay as they are: a rollback of
-- numbers must not let in a key that was revoked meanwhile.
CREATE FUNCTION tollgate_rollback(target bigint) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    name text;
    fields text[];
    columns text;
    highest bigint;
BEGIN
    IF target <> 0 AND NOT EXISTS (SELECT FROM rule_versions WHERE version = target) THEN
        RAISE EXCEPTION 'there is no version %', target USING ERRCODE = 'no_data_found';
    END IF;
    IF coalesce(current_setting('tollgate.what', true), '') = '' THEN
        PERFORM set_config('tollgate.what', 'rollback to ' || target, true);
    END IF;
    LOCK TABLE rate_limit_rule, plan_rules IN SHARE ROW EXCLUSIVE MODE;
    FOREACH name IN ARRAY ARRAY['rate_limit_rule', 'plan_rules'] LOOP
        -- What a row was before the first change after the target is what it was at the target.
        CREATE TEMP TABLE tollgate_then ON COMMIT DROP AS
            SELECT id, before, (SELECT array_agg(k ORDER BY k) FROM jsonb_object_keys(before) k) AS fields
            FROM (SELECT DISTINCT ON (row_id) row_id::bigint AS id, before FROM rule_changes
                  WHERE source = name AND version > target ORDER BY row_id, rule_changes.id) first;
        -- First all that differs goes, then all comes that was: two rows may have changed places.
        EXECUTE format('DELETE FROM %I r USING tollgate_then t WHERE r.id = t.id
                        AND to_jsonb(r) - ''updated_at'' IS DISTINCT FROM t.before - ''updated_at''', name);
        -- A row from before a column was added has the default of that column.
        FOR fields IN SELECT DISTINCT t.fields FROM tollgate_then t WHERE t.before IS NOT NULL LOOP
            SELECT string_agg(format('%I', attname), ', ' ORDER BY attnum) INTO columns FROM pg_attribute
            WHERE attrelid = name::regclass AND attnum > 0 AND NOT attisdropped AND attname::text = ANY (fields);
            EXECUTE format('INSERT INTO %I (%s) OVERRIDING SYSTEM VALUE
                            SELECT %s FROM (SELECT (jsonb_populate_record(NULL::%I, t.before)).* FROM tollgate_then t
                                            WHERE t.fields = $1) r
                            ON CONFLICT (id) DO NOTHING', name, columns, columns, name) USING fields;
        END LOOP;
        DROP TABLE tollgate_then;
        -- A sequence that was restarted must not give out a number that has come back.
        BEGIN
            EXECUTE format('SELECT max(id) FROM %I', name) INTO highest;
            IF highest > coalesce(pg_sequence_last_value(pg_get_serial_sequence(name, 'id')::regclass), 0) THEN
                PERFORM setval(pg_get_serial_sequence(name, 'id'), highest);
            END IF;
        EXCEPTION WHEN insufficient_privilege THEN
            NULL; -- Who may only write rules has not restarted a sequence either.
        END;
    END LOOP;
    RETURN (SELECT version FROM rule_versions WHERE xid = pg_current_xact_id() AND at = now());
END $$;
