//! The cases, by what they are about.

mod changes;
mod connection;
mod cut_transfers;
mod detached;
mod egress;
mod ends;
mod events;
mod files;
mod forward;
mod life;
mod lifetime;
mod limits;
mod lineage;
mod load;
mod loss;
mod network;
mod output;
mod profiles;
mod safety;
mod secrets;
mod setup;
mod shell;
mod shell_ends;
mod snapshots;
mod starts;
mod stats;
mod streams;
mod terminal;
mod tools;
mod transfers;
mod watches;

use std::pin::Pin;

use sandbox_core::Feature;

use crate::{Check, Context};

/// Something that every backend must do.
#[derive(Clone, Copy)]
pub struct Case {
    /// What it is about and what must hold: `life::destroy_twice_succeeds_twice`.
    pub name: &'static str,
    /// Features without which it makes no sense.
    pub needs: &'static [Feature],
    pub(crate) run: for<'a> fn(&'a Context) -> Pin<Box<dyn Future<Output = Check> + 'a>>,
}

impl std::fmt::Debug for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Case({}, needs {:?})", self.name, self.needs)
    }
}

/// Every case.
#[must_use]
pub fn all() -> Vec<Case> {
    [
        life::CASES,
        lifetime::CASES,
        loss::CASES,
        events::CASES,
        snapshots::CASES,
        lineage::CASES,
        starts::CASES,
        output::CASES,
        ends::CASES,
        detached::CASES,
        connection::CASES,
        terminal::CASES,
        shell::CASES,
        shell_ends::CASES,
        load::CASES,
        files::CASES,
        streams::CASES,
        transfers::CASES,
        cut_transfers::CASES,
        watches::CASES,
        changes::CASES,
        limits::CASES,
        stats::CASES,
        network::CASES,
        forward::CASES,
        egress::CASES,
        safety::CASES,
        profiles::CASES,
        setup::CASES,
        secrets::CASES,
        tools::CASES,
    ]
    .concat()
}

/// A table of cases: `cases!("life"; [] destroy_twice_succeeds_twice, …)`, each with the features that it
/// needs.
macro_rules! cases {
    ($about:literal; $([$($feature:ident),*] $name:ident,)*) => {
        pub(super) const CASES: &[$crate::cases::Case] = &[$(
            $crate::cases::Case {
                name: concat!($about, "::", stringify!($name)),
                needs: &[$(sandbox_core::Feature::$feature),*],
                run: |context| Box::pin($name(context)),
            },
        )*];
    };
}
use cases;
