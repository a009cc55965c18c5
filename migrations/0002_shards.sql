-- How many buckets one very large bucket is split over, so that a cluster shares its load.

ALTER TABLE rate_limit_rule ADD COLUMN shards bigint NOT NULL DEFAULT 1 CHECK (shards BETWEEN 1 AND 64);
ALTER TABLE plan_rules ADD COLUMN shards bigint NOT NULL DEFAULT 1 CHECK (shards BETWEEN 1 AND 64);
