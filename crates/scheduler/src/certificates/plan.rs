//! Decides which certificates have to be made or renewed.

use std::collections::BTreeMap;

use tessera_serve::authority::{AuthorityError, Issued, Side, issue, new_authority};

/// Name of the Secret with the authority and its key. Only the scheduler may read it.
pub const AUTHORITY: &str = "tessera-scheduler-ca";

/// Name of the Secret with the server's certificate.
pub const SERVER: &str = "tessera-scheduler-tls";

/// Name of the Secret with kube-scheduler's certificate.
pub const CLIENT: &str = "tessera-kube-scheduler-tls";

/// The keys of a Secret: certificate, key, authority, and the time of renewal in seconds since 1970.
pub const KEYS: [&str; 4] = ["tls.crt", "tls.key", "ca.crt", "renew-after"];

/// The name of the server that kube-scheduler checks: `serverName` in the shipped configuration. It is the same in
/// every namespace.
pub const SERVER_NAME: &str = "tessera-scheduler.kube-system.svc";

/// The contents of one Secret.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pem {
    /// The first certificate in PEM, without its issuer.
    pub certificate: String,
    /// The private part, in PEM.
    pub key: String,
    /// The authority that the other side is checked against. After a renewal it contains the previous one too.
    pub authority: String,
    /// Time of the renewal, in seconds since 1970.
    pub renew_after: u64,
}

/// The contents of all Secrets; `None` for a Secret without certificates.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stored {
    /// The issuer of the other two.
    pub authority: Option<Pem>,
    /// The server's certificate.
    pub server: Option<Pem>,
    /// kube-scheduler's certificate.
    pub client: Option<Pem>,
}

impl Pem {
    /// Reads a Secret, unless it is empty or damaged.
    #[must_use]
    pub fn read(data: &BTreeMap<&str, String>) -> Option<Self> {
        let text = |key: usize| data.get(KEYS[key]).filter(|text| !text.is_empty()).cloned();
        Some(Self {
            certificate: text(0)?,
            key: text(1)?,
            authority: text(2)?,
            renew_after: text(3)?.parse().ok()?,
        })
    }

    /// Returns the data of the Secret.
    #[must_use]
    pub fn write(&self) -> BTreeMap<&'static str, String> {
        let Self { certificate, key, authority, renew_after } = self.clone();
        KEYS.into_iter().zip([certificate, key, authority, renew_after.to_string()]).collect()
    }

    fn new(issued: Issued, authority: String) -> Self {
        let Issued { certificate, key, renew_after } = issued;
        Self { certificate, key, authority, renew_after }
    }

    fn is_current(&self, authority: &str, now: u64) -> bool {
        now < self.renew_after && self.authority == authority
    }
}

/// Returns the contents of all Secrets after the renewal of those that are missing or due.
pub fn renew(stored: &Stored, client_name: &str, now: u64) -> Result<Stored, AuthorityError> {
    let authority = match &stored.authority {
        Some(known) if now < known.renew_after => known.clone(),
        known => {
            let issued = new_authority(now)?;
            // kube-scheduler reads the authority only when it starts, so the server trusts the previous one too.
            let before = known.as_ref().map(|known| known.certificate.as_str()).unwrap_or_default();
            let trusted = format!("{}{before}", issued.certificate);
            Pem::new(issued, trusted)
        }
    };
    let side = |known: &Option<Pem>, side, names: &[&str]| match known {
        Some(known) if known.is_current(&authority.authority, now) => Ok(known.clone()),
        _ => issue(&authority.key, side, names, now)
            .map(|issued| Pem::new(issued, authority.authority.clone())),
    };
    let server = side(&stored.server, Side::Server, &[SERVER_NAME])?;
    let client = side(&stored.client, Side::Client, &[client_name])?;
    Ok(Stored { authority: Some(authority), server: Some(server), client: Some(client) })
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: u64 = 24 * 60 * 60;
    const NOW: u64 = 1_800_000_000;

    fn renewed(stored: &Stored, days: u64) -> Stored {
        renew(stored, "client", NOW + days * DAY).unwrap()
    }

    #[test]
    fn missing_certificates_are_made_and_current_ones_are_kept() {
        let first = renewed(&Stored::default(), 0);
        assert_eq!(renewed(&first, 240), first);
        let without_server = Stored { server: None, ..first.clone() };
        let again = renewed(&without_server, 1);
        assert_eq!((&again.authority, &again.client), (&first.authority, &first.client));
        assert_ne!(again.server, first.server);
        assert_eq!(Pem::read(&first.server.as_ref().unwrap().write()), first.server);
        assert_eq!(Pem::read(&BTreeMap::new()), None);
    }

    #[test]
    fn certificates_are_renewed_months_before_they_expire() {
        let first = renewed(&Stored::default(), 0);
        let second = renewed(&first, 245);
        assert_eq!(second.authority, first.authority);
        assert_ne!(second.server, first.server);
        assert_ne!(second.client, first.client);
    }

    #[test]
    fn both_sides_trust_the_previous_authority_after_its_renewal() {
        let first = renewed(&Stored::default(), 0);
        let second = renewed(&first, 3000);
        let (before, after) = (first.authority.unwrap(), second.authority.unwrap());
        assert_ne!(after.key, before.key);
        let server = second.server.unwrap();
        assert!(
            server.authority.contains(&before.certificate) && server.authority.contains(&after.certificate)
        );
    }
}
