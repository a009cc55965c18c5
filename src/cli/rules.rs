//! `tollgate rules`: the rules of the database, and their versions.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use super::{database, say};
use crate::config::{self, Row, env};
use crate::source;
use crate::source::postgres::Table;
use crate::source::postgres::write::{Address, Author, Condition, Writer};

#[derive(Debug, Args)]
pub(super) struct Rules {
    /// The configuration file, which names the database.
    #[arg(long, value_name = "FILE", default_value = "conf/tollgate.yaml", global = true)]
    config: PathBuf,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Prints the rules of the database, one a line, as a configuration writes them.
    List(Filter),
    /// Prints the newest versions: each change is one.
    Versions {
        /// How many.
        #[arg(long, value_name = "NUMBER", default_value_t = 50)]
        limit: u32,
    },
    /// Prints what is different at version TO from version FROM.
    Diff {
        /// The version to compare with; 0 is the empty database.
        from: i64,
        /// The version to compare.
        to: i64,
    },
    /// Puts the rules back to what they were at a version; that is a new version itself.
    Rollback {
        /// The version.
        version: i64,
    },
    /// Adds a rule, or puts it in the place of the one that is there: what is not given is as by default.
    Set(Box<Set>),
    /// Deletes a rule.
    Delete(Place),
    /// Adds or changes all rules of a file: a list of rows as a configuration writes them, or as `export` does.
    Import {
        /// The file; - for standard input.
        file: PathBuf,
    },
    /// Prints all rules of the database as `import` reads them.
    Export,
}

#[derive(Debug, Args)]
struct Filter {
    /// Only those of this tenant.
    #[arg(long)]
    tenant: Option<String>,
    /// Only those of this plan.
    #[arg(long)]
    plan: Option<String>,
    /// Only those on this route.
    #[arg(long)]
    route: Option<String>,
}

#[derive(Debug, Args)]
struct Place {
    /// The tenant; * for any.
    #[arg(long, required_unless_present = "plan", conflicts_with = "plan")]
    tenant: Option<String>,
    /// The plan, instead of a tenant.
    #[arg(long)]
    plan: Option<String>,
    /// The route; * for any.
    #[arg(long, default_value = "*")]
    route: String,
}

#[derive(Debug, Args)]
struct Set {
    #[command(flatten)]
    place: Place,
    /// Tokens that fit.
    #[arg(long)]
    capacity: String,
    /// The rate: 100 (per second), 5/m, 1000/h ...
    #[arg(long, value_name = "RATE")]
    refill_per_second: String,
    /// enforce, shadow or off.
    #[arg(long)]
    mode: Option<String>,
    /// The share of subjects that enforce holds for.
    #[arg(long, value_name = "PERCENT")]
    enforce_percent: Option<String>,
    /// local, allow or deny.
    #[arg(long, value_name = "WORD")]
    on_store_failure: Option<String>,
    /// How many buckets one bucket is split over.
    #[arg(long, value_name = "NUMBER")]
    shards: Option<String>,
    /// The capacity of a candidate.
    #[arg(long, value_name = "CAPACITY", requires = "candidate_refill_per_second")]
    candidate_capacity: Option<String>,
    /// The rate of a candidate.
    #[arg(long, value_name = "RATE", requires = "candidate_capacity")]
    candidate_refill_per_second: Option<String>,
    /// From when on it counts: 2026-12-24T18:00:00Z.
    #[arg(long, value_name = "TIME")]
    valid_from: Option<String>,
    /// From when on it counts no more.
    #[arg(long, value_name = "TIME")]
    valid_until: Option<String>,
}

impl Rules {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let config = database::config(&self.config)?;
        let settings = database::of(&config, &self.config)?;
        let routes: Vec<&str> = config.routes.iter().map(|route| &*route.id.value).collect();
        database::block_on(async {
            let writer = Writer::new(&settings.url.value)?;
            self.command.run(&writer, &routes).await
        })?
    }
}

impl Command {
    async fn run(self, writer: &Writer, routes: &[&str]) -> anyhow::Result<ExitCode> {
        let who = database::who();
        let author = |what| Author { who: &who, what };
        match self {
            Self::List(filter) => {
                let rules = writer.list().await?;
                rules.iter().filter(|rule| filter.takes(rule)).for_each(|rule| say!("- {}", flow(rule)));
            }
            Self::Export => {
                say!("rows:");
                for rule in writer.list().await? {
                    // What cannot be served could not be read again either.
                    let sign = if rule["fault"].is_null() { "-" } else { "#" };
                    say!("  {sign} {}", flow(&rule));
                }
            }
            Self::Versions { limit } => {
                for version in writer.versions(limit).await? {
                    say!(
                        "{:>6}  {}  {:>6} changed  {}  {}",
                        version["version"],
                        text(&version["at"]),
                        version["changes"],
                        text(&version["who"]),
                        text(&version["what"])
                    );
                }
            }
            Self::Diff { from, to } => {
                for change in writer.diff(from, to).await? {
                    let table = text(&change["table"]);
                    for (sign, side) in [("-", &change["before"]), ("+", &change["after"])] {
                        if !side.is_null() {
                            say!("{sign} {table} {}", flow(side));
                        }
                    }
                }
            }
            Self::Rollback { version } => {
                let what = format!("rollback to {version}");
                tell(writer.rollback(version, &author(&what)).await?);
            }
            Self::Set(set) => {
                let rows = set.rows()?;
                warn_of_routes(&rows, routes);
                tell(writer.put(&rows, &author("set")).await?);
            }
            Self::Delete(place) => {
                tell(writer.delete(&place.address(), &Condition::default(), &author("delete")).await?);
            }
            Self::Import { file } => {
                let text = if file.as_os_str() == "-" {
                    std::io::read_to_string(std::io::stdin())?
                } else {
                    source::file::read(&file).map_err(|error| anyhow::anyhow!("{error}"))?
                };
                let rows = rows(&text, &file.display().to_string())?;
                warn_of_routes(&rows, routes);
                let what = format!("import of {} rows", rows.len());
                tell(writer.put(&rows, &author(&what)).await?);
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// The database takes a rule for any route; gateways skip it until there is one.
fn warn_of_routes(rows: &[Row], routes: &[&str]) {
    for route in rows.iter().filter_map(|row| row.route.as_ref()) {
        if *route.value != *"default" && !routes.contains(&&*route.value) {
            eprintln!("warning: the configuration has no route `{}`; gateways skip such a rule", route.value);
        }
    }
}

fn tell(version: Option<i64>) {
    match version {
        Some(version) => say!("version {version}"),
        None => say!("nothing changes"),
    }
}

fn rows(text: &str, place: &str) -> anyhow::Result<Vec<Row>> {
    config::read_rows(text, &env::process).map_err(|faults| {
        let faults: Vec<String> = faults.iter().map(|fault| format!("{place}:{fault}")).collect();
        anyhow::anyhow!("{}", faults.join("\n"))
    })
}

impl Filter {
    fn takes(&self, rule: &Value) -> bool {
        [("tenant", &self.tenant), ("plan", &self.plan), ("route", &self.route)]
            .iter()
            .all(|(name, wanted)| wanted.as_ref().is_none_or(|wanted| rule[*name] == **wanted))
    }
}

impl Place {
    fn address(&self) -> Address<'_> {
        let (table, holder) = match (&self.plan, &self.tenant) {
            (Some(plan), _) => (Table::PlanRules, &**plan),
            (None, tenant) => (Table::Rules, tenant.as_deref().unwrap_or("*")),
        };
        Address { table, holder, route: &self.route }
    }
}

impl Set {
    /// The row, read like one of a file, so that the same is right here and there.
    fn rows(&self) -> anyhow::Result<Vec<Row>> {
        let mut row = json!({
            "tenant": self.place.tenant,
            "plan": self.place.plan,
            "route": self.place.route,
            "capacity": self.capacity,
            "refill_per_second": self.refill_per_second,
            "mode": self.mode,
            "enforce_percent": self.enforce_percent,
            "on_store_failure": self.on_store_failure,
            "shards": self.shards,
            "valid_from": self.valid_from,
            "valid_until": self.valid_until,
        });
        if let (Some(capacity), Some(rate)) = (&self.candidate_capacity, &self.candidate_refill_per_second) {
            row["candidate"] = json!({ "capacity": capacity, "refill_per_second": rate });
        }
        if let Some(fields) = row.as_object_mut() {
            fields.retain(|_, value| !value.is_null());
        }
        let row = source::row_from_json(&row).map_err(anyhow::Error::msg)?;
        Ok(vec![row])
    }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// A value as one line of YAML.
fn flow(value: &Value) -> String {
    match value {
        Value::Object(fields) => {
            let fields: Vec<String> =
                fields.iter().map(|(name, value)| format!("{name}: {}", flow(value))).collect();
            format!("{{{}}}", fields.join(", "))
        }
        Value::String(text) if is_plain(text) => text.clone(),
        // JSON is YAML.
        other => other.to_string(),
    }
}

/// Whether a text stands for itself in YAML, and for nothing else: letters first, and no word with a
/// meaning of its own.
fn is_plain(text: &str) -> bool {
    let word =
        matches!(text.to_ascii_lowercase().as_str(), "null" | "true" | "false" | "yes" | "no" | "on" | "off");
    !word
        && text.starts_with(|first: char| first.is_ascii_alphabetic())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
}
