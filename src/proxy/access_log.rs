//! One line per request, of a sample of them. No key, address or query: they may name somebody.

use std::hash::{BuildHasher as _, RandomState};

use pingora::prelude::Error;
use pingora::proxy::Session;

use super::Context;
use crate::clock::Timestamp;

pub(super) fn write(session: &Session, ctx: &Context, status: u16, error: Option<&Error>, now: Timestamp) {
    if !is_sampled(ctx.live.access_sample) {
        return;
    }
    let (rule, outcome, basis) = match &ctx.decided {
        Some((checks, decision)) => (decision.rule(checks), decision.outcome(checks), decision.basis.label()),
        None => ("", "rejected", ""),
    };
    tracing::info!(
        target: "access",
        method = session.req_header().method.as_str(),
        path = session.req_header().uri.path(),
        status,
        route = &*ctx.live.snapshot.routes.get(ctx.route).id,
        rule,
        outcome,
        basis,
        micros = now.micros_since(ctx.started),
        error = error.map(tracing::field::display),
    );
}

#[expect(clippy::cast_precision_loss, reason = "a sample is no exact share")]
fn is_sampled(share: f64) -> bool {
    share > 0.0 && (share >= 1.0 || (RandomState::new().hash_one(0u8) as f64) < share * u64::MAX as f64)
}
