//! The family of certificates' ends, which the scheduler and the agents write.

use crate::metrics::{Labels, MetricKind::Gauge, MetricsPage};

/// Name of the family.
pub const FAMILY: &str = "tessera_certificate_expiry_timestamp_seconds";

/// Writes the ends of certificates, in seconds since 1970, by what the certificates are for. Each has labels of its
/// own besides.
pub fn write<'a>(page: &mut MetricsPage, ends: impl IntoIterator<Item = (&'a Labels, &'a str, u64)>) {
    let help = "Time at which a certificate expires, in seconds since 1970.";
    let mut family = page.family(FAMILY, Gauge, help);
    for (labels, certificate, unix_seconds) in ends {
        family.sample(&labels.and(&[("certificate", certificate)]), unix_seconds);
    }
}
