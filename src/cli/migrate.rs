//! `tollgate migrate`.

use std::path::Path;
use std::process::ExitCode;

use super::database;
use crate::source::postgres::schema;

pub(super) fn run(path: &Path) -> anyhow::Result<ExitCode> {
    let settings = database::of(&database::config(path)?, path)?;
    let migrated = database::block_on(schema::migrate(&settings.url.value))??;
    for migration in &migrated.applied {
        println!("applied {migration}");
    }
    println!("the database is at migration {:04}", migrated.newest);
    Ok(ExitCode::SUCCESS)
}
