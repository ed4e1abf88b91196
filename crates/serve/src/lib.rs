//! The connection layer of Tessera's HTTP servers.
//!
//! [`table`] decides which connections a listener keeps, [`browser`] which requests of browsers are answered; both
//! are free of IO. [`access`] reads tokens. [`serve`] accepts connections by these decisions, and [`Tls`] adds TLS with
//! certificates that may be replaced at run time.

#![warn(missing_docs)]

pub mod access;
pub mod authority;
pub mod browser;
mod expiry;
pub mod files;
mod listen;
pub mod table;
mod tls;

pub use self::expiry::{CertificateExpiry, CertificateRole};
pub use self::listen::{ServeOptions, serve};
pub use self::table::ConnectionLimits;
pub use self::tls::{ClientCheck, Tls, TlsError, TlsFiles, TlsPem, check_own_client, client_configuration};
