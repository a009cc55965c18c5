//! `tollgate keys`: API keys of the database. A key is shown once, and kept nowhere.

use std::io::Read as _;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Args, Subcommand};
use serde_json::Value;

use super::{database, say};
use crate::key::{Hasher, hex};
use crate::source::postgres::write::{Author, Writer};

#[derive(Debug, Args)]
pub(super) struct Keys {
    /// The configuration file, which names the database and the `hash_secret`.
    #[arg(long, value_name = "FILE", default_value = "conf/tollgate.yaml", global = true)]
    config: PathBuf,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Makes a key for a tenant, and prints it: this once.
    Create {
        /// Whose it is.
        #[arg(long)]
        tenant: String,
        /// What it is for.
        #[arg(long)]
        note: Option<String>,
    },
    /// Revokes a key by its number.
    Revoke {
        /// The number, as `list` shows it.
        id: i64,
    },
    /// Prints the keys: numbers and tenants.
    List,
}

impl Keys {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let config = database::config(&self.config)?;
        let settings = database::of(&config, &self.config)?;
        let hasher = Hasher::new(config.identity.hash_secret.0.as_bytes());
        database::block_on(async {
            let writer = Writer::new(&settings.url.value)?;
            self.command.run(&writer, &hasher).await
        })?
    }
}

impl Command {
    async fn run(self, writer: &Writer, hasher: &Hasher) -> anyhow::Result<ExitCode> {
        let who = database::who();
        match self {
            Self::Create { tenant, note } => {
                anyhow::ensure!(!matches!(&*tenant, "" | "*"), "expected the name of a tenant");
                let key = new_key()?;
                let author = Author { who: &who, what: "key created" };
                let id = writer
                    .add_key(&hasher.key_hash(key.as_bytes()), &tenant, note.as_deref(), &author)
                    .await?;
                eprintln!("key {id} of {tenant}; it is not shown again:");
                say!("{key}");
            }
            Self::Revoke { id } => {
                let what = format!("key {id} revoked");
                writer.revoke_key(id, &Author { who: &who, what: &what }).await?;
                say!("key {id} is revoked");
            }
            Self::List => {
                for key in writer.keys().await? {
                    let text = |name: &str| key[name].as_str().unwrap_or("-").to_owned();
                    let state = match &key["revoked_at"] {
                        Value::String(at) => format!("revoked {at}"),
                        _ => "valid".into(),
                    };
                    say!(
                        "{:>6}  {}  created {}  {state}  {}",
                        key["id"],
                        text("tenant"),
                        text("created_at"),
                        text("note")
                    );
                }
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// 256 bits of the system's randomness, in hex.
fn new_key() -> anyhow::Result<String> {
    let mut random = [0; 32];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut source| source.read_exact(&mut random))
        .context("the system gives no random numbers")?;
    Ok(format!("tg_{}", hex(&random)))
}
