//! The command line.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "the terminal is this module's interface")]

mod check;
mod database;
mod demo;
mod doctor;
mod healthcheck;
mod keys;
mod migrate;
mod rules;
mod serve;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::config::SCHEMA;

/// A line to standard output. Whoever reads may have read enough (`| head`): then nobody is told.
macro_rules! say {
    ($($argument:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stdout(), $($argument)*);
    }};
}
use say;

/// Exit code for a configuration with faults, and for a wrong command line.
const EXIT_FAULTS: u8 = 2;

/// An edge proxy that limits request rates truthfully over a whole cluster of gateways.
#[derive(Debug, Parser)]
#[command(name = "tollgate", version, about, max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Runs the gateway.
    Serve {
        /// The configuration file.
        #[arg(long, value_name = "FILE", default_value = "conf/tollgate.yaml")]
        config: PathBuf,
    },
    /// Runs a gateway that needs nothing else: memory store, echo upstream, sample rules.
    Demo(demo::Demo),
    /// Tells every fault of a configuration, or of each in a folder. Exit code 0 or 2.
    Check {
        /// The file, or a folder of .yaml files.
        #[arg(long, value_name = "FILE", default_value = "conf/tollgate.yaml")]
        config: PathBuf,
    },
    /// Brings the tables of the database up to date.
    Migrate {
        /// The configuration file, which names the database.
        #[arg(long, value_name = "FILE", default_value = "conf/tollgate.yaml")]
        config: PathBuf,
    },
    /// Lists and changes the rules of the database, and its versions.
    Rules(rules::Rules),
    /// Makes, lists and revokes API keys.
    Keys(keys::Keys),
    Doctor(doctor::Doctor),
    /// Prints the JSON Schema of the configuration.
    Schema,
    /// Asks a URL, and exits with 0 if it answers 200 within 2 seconds: for container health checks.
    Healthcheck {
        /// http://host:port/path
        #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:9090/healthz")]
        url: String,
    },
}

/// Runs the command that the process was started with.
pub fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Serve { config } => serve::run(&config),
        Command::Demo(demo) => demo.run(),
        Command::Check { config } => Ok(check::run(&config)),
        Command::Migrate { config } => migrate::run(&config),
        Command::Rules(rules) => rules.run(),
        Command::Keys(keys) => keys.run(),
        Command::Doctor(doctor) => doctor.run(),
        Command::Healthcheck { url } => healthcheck::run(&url),
        Command::Schema => {
            print!("{SCHEMA}");
            Ok(ExitCode::SUCCESS)
        }
    };
    result.unwrap_or_else(|error| {
        eprintln!("tollgate: {error:#}");
        ExitCode::FAILURE
    })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_consistent() {
        super::Arguments::command().debug_assert();
    }
}
