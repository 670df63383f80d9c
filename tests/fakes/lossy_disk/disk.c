/* A disk that loses what was not synced: for processes that preload this library.
 *
 * Each sync of a file or folder below ROOT leaves an image of it in IMAGES: the bytes of a file, or the names in a
 * folder. These are what a loss of power cannot take. Both are compiled in: a process may have a cleaned environment.
 * See disk.py. Linux, with the GNU C library.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define KEY_MAX 96
#define REAL(name) ((__typeof__(&name))found(#name))

static void *found(const char *name) {
    void *call = dlsym(RTLD_NEXT, name);
    if (!call) abort();
    return call;
}

/* Whether `path` is ROOT or below it. */
static bool is_ours(const char *path) {
    size_t length = strlen(ROOT);
    return !strncmp(path, ROOT, length) && (path[length] == 0 || path[length] == '/');
}

static bool path_of(int fd, char path[PATH_MAX]) {
    char name[64];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(name, path, PATH_MAX - 1);
    if (length < 0) return false;
    path[length] = 0;
    return true;
}

static bool is_fd_ours(int fd) {
    char path[PATH_MAX];
    return path_of(fd, path) && is_ours(path);
}

/* A name for a file that no later file gets: the number of an inode is used again, its time of birth is not. */
static bool key_of(int folder, const char *name, int flags, char key[KEY_MAX], mode_t *mode) {
    struct statx info;
    if (statx(folder, name, flags | AT_SYMLINK_NOFOLLOW, STATX_BASIC_STATS | STATX_BTIME, &info)) return false;
    snprintf(key, KEY_MAX, "%llu-%lld-%u", (unsigned long long)info.stx_ino, (long long)info.stx_btime.tv_sec,
             info.stx_btime.tv_nsec);
    *mode = info.stx_mode;
    return true;
}

static void write_all(int fd, const char *data, size_t size) {
    while (size) {
        ssize_t written = syscall(SYS_write, fd, data, size);
        if (written < 0) {
            if (errno == EINTR) continue;
            abort();
        }
        data += written, size -= written;
    }
}

static void copy_bytes(int source, int target) {
    static __thread char buffer[1 << 18];
    off_t at = 0;
    ssize_t got;
    while ((got = pread(source, buffer, sizeof buffer, at)) != 0) {
        if (got < 0) {
            if (errno == EINTR) continue;
            abort();
        }
        write_all(target, buffer, got);
        at += got;
    }
}

/* Where a symbolic link leads to, as hexadecimal digits. */
static bool target_of(int folder, const char *name, char digits[2 * PATH_MAX]) {
    char target[PATH_MAX];
    ssize_t length = readlinkat(folder, name, target, sizeof target - 1);
    for (ssize_t n = 0; n < length; n++) sprintf(digits + 2 * n, "%02x", (unsigned char)target[n]);
    return length > 0;
}

/* Write the names in a folder: a line each of its kind, its mode, the key of what it names, and the name. */
static void list_names(int folder, int target) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", folder);
    DIR *names = opendir(path);
    if (!names) return;
    struct dirent *each;
    while ((each = readdir(names))) {
        char key[2 * PATH_MAX], line[2 * PATH_MAX + 300];
        mode_t mode;
        if (!strcmp(each->d_name, ".") || !strcmp(each->d_name, "..")) continue;
        if (!key_of(folder, each->d_name, 0, key, &mode)) continue;
        char kind = S_ISDIR(mode) ? 'd' : S_ISREG(mode) ? 'f' : S_ISLNK(mode) ? 'l' : 0;
        if (!kind) continue; /* a socket, a pipe */
        if (kind == 'l' && !target_of(folder, each->d_name, key)) continue;
        write_all(target, line, snprintf(line, sizeof line, "%c %o %s %s\n", kind, mode & 07777, key, each->d_name));
    }
    closedir(names);
}

/* Leave an image of what a descriptor has. One process at a time: an older image never replaces a newer one. */
static void record(int fd) {
    char key[KEY_MAX], image[PATH_MAX], part[PATH_MAX + 16], lock[PATH_MAX + 16], own[64];
    mode_t mode;
    int error = errno;
    snprintf(own, sizeof own, "/proc/self/fd/%d", fd);
    int source = open(own, O_RDONLY | O_CLOEXEC); /* the descriptor may be open to write only */
    if (source < 0 && errno == ENOENT) goto end;   /* nothing names the file any more */
    if (source < 0 || !key_of(source, "", AT_EMPTY_PATH, key, &mode)) abort();
    snprintf(image, sizeof image, "%s/%s", IMAGES, key);
    snprintf(part, sizeof part, "%s.part", image);
    snprintf(lock, sizeof lock, "%s.lock", image);
    int locked = open(lock, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    while (flock(locked, LOCK_EX))
        if (errno != EINTR) abort();
    int target = syscall(SYS_openat, AT_FDCWD, part, O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0600);
    if (target < 0) abort();
    if (S_ISDIR(mode)) list_names(source, target);
    else copy_bytes(source, target);
    close(target);
    if (rename(part, image)) abort();
    close(locked);
    close(source);
end:
    errno = error;
}

int fsync(int fd) {
    int result = REAL(fsync)(fd);
    if (!result && is_fd_ours(fd)) record(fd);
    return result;
}

int fdatasync(int fd) {
    int result = REAL(fdatasync)(fd);
    if (!result && is_fd_ours(fd)) record(fd);
    return result;
}

int lossy_disk_record(const char *path);

static int record_at(const char *path, const struct stat *info, int kind, struct FTW *place) {
    (void)info, (void)place;
    if (kind == FTW_F || kind == FTW_D) lossy_disk_record(path);
    return 0;
}

int syncfs(int fd) {
    int result = REAL(syncfs)(fd);
    if (!result && is_fd_ours(fd)) nftw(ROOT, record_at, 32, FTW_PHYS);
    return result;
}

/* For disk.py: leave images of these, synced or not. */
int lossy_disk_record(const char *path) {
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0) return -errno;
    record(fd);
    close(fd);
    return 0;
}

/* For disk.py: the key of a file or folder. */
int lossy_disk_key(const char *path, char key[KEY_MAX]) {
    mode_t mode;
    return key_of(AT_FDCWD, path, 0, key, &mode) ? 0 : -errno;
}
