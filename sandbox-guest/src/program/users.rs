//! Users and groups by name, from the sandbox's own `/etc/passwd` and `/etc/group`: a static program
//! has no other way to ask for them.

use std::io::Read;

use sandbox_guest::{Failure, FailureKind};

use super::base::failure;

/// Longer databases are cut: they come from the sandbox.
const MAX_DATABASE: u64 = 4 * 1024 * 1024;

/// Whom a process runs as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct User {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) groups: Vec<u32>,
    pub(crate) name: Option<String>,
    pub(crate) home: Option<String>,
}

struct Account<'a> {
    name: &'a str,
    uid: u32,
    gid: u32,
    home: &'a str,
}

/// Finds `user[:group]`, each by name or number.
pub(crate) fn find(spec: &str) -> Result<User, Failure> {
    find_in(spec, &read("/etc/passwd"), &read("/etc/group"))
}

fn read(path: &str) -> String {
    let mut bytes = Vec::new();
    if let Ok(file) = std::fs::File::open(path) {
        let _ = file.take(MAX_DATABASE).read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn find_in(spec: &str, passwd: &str, group: &str) -> Result<User, Failure> {
    let (user, wanted_group) = match spec.split_once(':') {
        Some((user, group)) => (user, Some(group)),
        None => (spec, None),
    };
    let missing = |what: &str, name: &str| {
        failure(FailureKind::NotFound, format!("there is no {what} {name:?} in the sandbox"))
    };
    let number = user.parse::<u32>().ok();
    let account = accounts(passwd)
        .find(|a| a.name == user)
        .or_else(|| accounts(passwd).find(|a| Some(a.uid) == number));
    let (uid, mut gid) = match (&account, number) {
        (Some(account), _) => (account.uid, account.gid),
        (None, Some(uid)) => (uid, uid),
        (None, None) => return Err(missing("user", user)),
    };
    let mut groups = Vec::new();
    if let Some(wanted) = wanted_group {
        let known = group_lines(group).find(|g| g.0 == wanted).map(|g| g.1);
        gid = known.or(wanted.parse().ok()).ok_or_else(|| missing("group", wanted))?;
    } else if let Some(account) = &account {
        let member = |g: &(&str, u32, &str)| g.2.split(',').any(|name| name == account.name);
        groups.extend(group_lines(group).filter(member).map(|g| g.1));
    }
    groups.push(gid);
    groups.sort_unstable();
    groups.dedup();
    Ok(User {
        uid,
        gid,
        groups,
        name: account.as_ref().map(|a| a.name.to_owned()),
        home: account.as_ref().map(|a| a.home.to_owned()),
    })
}

fn accounts(passwd: &str) -> impl Iterator<Item = Account<'_>> {
    passwd.lines().filter_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        let uid = fields.nth(1)?.parse().ok()?;
        let gid = fields.next()?.parse().ok()?;
        let home = fields.nth(1)?;
        Some(Account { name, uid, gid, home })
    })
}

fn group_lines(group: &str) -> impl Iterator<Item = (&str, u32, &str)> {
    group.lines().filter_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        let gid = fields.nth(1)?.parse().ok()?;
        Some((name, gid, fields.next().unwrap_or_default()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\n\nbroken\nann:x:7:8::/home/ann:/bin/sh\n";
    const GROUP: &str = "root:x:0:\nann:x:8:\nwheel:x:10:bob,ann\n";

    #[test]
    fn names_and_numbers_are_found() {
        let ann = find_in("ann", PASSWD, GROUP).unwrap();
        assert_eq!((ann.uid, ann.gid, &ann.groups[..]), (7, 8, &[8, 10][..]));
        assert_eq!(ann.home.as_deref(), Some("/home/ann"));
        assert_eq!(find_in("7", PASSWD, GROUP).unwrap(), ann);
        let other = find_in("ann:wheel", PASSWD, GROUP).unwrap();
        assert_eq!((other.gid, &other.groups[..]), (10, &[10][..]));
        let number = find_in("4242:77", PASSWD, GROUP).unwrap();
        assert_eq!((number.uid, number.gid, number.name), (4242, 77, None));
    }

    #[test]
    fn the_missing_are_named() {
        let error = find_in("eve", PASSWD, GROUP).unwrap_err();
        assert_eq!(error.kind, FailureKind::NotFound);
        assert!(error.message.contains("user \"eve\""), "{}", error.message);
        let error = find_in("ann:eves", PASSWD, GROUP).unwrap_err();
        assert!(error.message.contains("group \"eves\""), "{}", error.message);
    }
}
