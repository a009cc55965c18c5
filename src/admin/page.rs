//! The page at `/` of the admin listener.

/// One page, without anything from elsewhere.
pub(super) const PAGE: &str = include_str!("page.html");
