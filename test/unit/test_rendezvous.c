// Tests of meeting_point.h, rendezvous.h and control_line.h: ranks are processes of this program, on one machine.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <arpa/inet.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include "control_line.h"
#include "spawn.h"

// ---------------------------------------------------------------------------------------------------------------------
// Ranks

enum { RANKS = 16, TOKEN = 77 };

// What became of a rank: written by its process.
typedef struct {
    bool ok, told;
    double seconds;
    char text[1024];
} Result;

static Result *results; // [RANKS], shared by the processes
static MeetingPoint point;

static double timeout = 20; // seconds; so long that only a failure takes it

typedef int (*RankProgram)(Rendezvous *ranks, Result *result);

// A meeting of its own; the results of so many ranks are poisoned.
static void new_point(int ranks) {
    unsigned char random[16];
    uint64_t port;
    assert_int_equal(getrandom(random, sizeof random, 0), sizeof random);
    memcpy(&port, random + 8, sizeof port);
    memset(&point, 0, sizeof point);
    // An address of its own, for tests that run at the same time; all of 127.0.0.0/8 is this machine.
    snprintf(point.address, sizeof point.address, "127.%d.%d.%d", random[0], random[1], 1 + random[2] % 250);
    point.port = spawn_port(port);
    point.token = TOKEN;
    point.source = "the test";
    timeout = 20;
    memset(results, 0xcd, (size_t)ranks * sizeof *results);
}

// Starts a rank that joins the others after a while, then runs a program, whose result is its exit code.
static pid_t start_rank(int rank, int world_size, int delay_ms, RankProgram program) {
    const pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid > 0) return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    Rendezvous ranks;
    Error error = {""};
    Result *result = &results[rank];
    error_identify(rank, world_size);
    snprintf(error_identity()->host, sizeof error_identity()->host, "host%d", rank);
    usleep((useconds_t)delay_ms * 1000);
    const double begin = tcp_now();
    result->ok = rendezvous_open(&ranks, &point, rank, world_size, timeout, &error);
    result->seconds = tcp_now() - begin;
    result->told = ranks.told;
    memcpy(result->text, error.text, sizeof result->text);
    const int code = result->ok && program != NULL ? program(&ranks, result) : 0;
    if (result->ok) rendezvous_close(&ranks);
    _exit(code);
}

static void expect_end(pid_t pid, int status) {
    int got = -1;
    assert_int_equal(waitpid(pid, &got, 0), pid);
    assert_int_equal(WIFEXITED(got) ? WEXITSTATUS(got) : -WTERMSIG(got), status);
}

static void expect_text(int rank, const char *part) {
    if (strstr(results[rank].text, part) == NULL)
        fail_msg("rank %d: \"%s\" is not in: %s", rank, part, results[rank].text);
}

static bool note(Result *result, bool ok, const Error *error) {
    if (!ok) memcpy(result->text, error->text, sizeof result->text);
    return ok;
}

// Gathers and broadcasts: 0 if all is as it must be.
static int exchange(Rendezvous *ranks, size_t bytes, Result *result) {
    Error error = {""};
    const size_t all_bytes = (size_t)ranks->world_size * bytes;
    unsigned char *mine = (unsigned char *)malloc(bytes + 1), *all = (unsigned char *)malloc(all_bytes + 1);
    for (size_t i = 0; i < bytes; i++) mine[i] = (unsigned char)(i * 7 + (size_t)ranks->rank);
    mine[bytes] = all[all_bytes] = 0xee;
    memset(all, 0xdd, all_bytes);
    if (!note(result, rendezvous_gather(ranks, mine, bytes, all, &error), &error)) return 3;
    for (size_t i = 0; i < all_bytes && ranks->rank == 0; i++)
        if (all[i] != (unsigned char)(i % bytes * 7 + i / bytes)) return 4;
    if (!note(result, rendezvous_broadcast(ranks, all, all_bytes, &error), &error)) return 5;
    for (size_t i = 0; i < all_bytes; i++)
        if (all[i] != (unsigned char)(i % bytes * 7 + i / bytes)) return 6;
    const int code = all[all_bytes] == 0xee ? 0 : 7;
    free(mine);
    free(all);
    return code;
}

static int exchange_little(Rendezvous *ranks, Result *result) {
    const int code = exchange(ranks, 3, result);
    return code != 0 ? code : exchange(ranks, 1104, result);
}

static int exchange_much(Rendezvous *ranks, Result *result) {
    return exchange(ranks, 3000001, result); // more than sockets hold
}

static void meet(int world_size, RankProgram program) {
    pid_t pids[RANKS];
    for (int i = 0; i < world_size; i++) {
        const int rank = (i * 7 + 3) % world_size; // 16 is prime to 7, and so are the others
        pids[rank] = start_rank(rank, world_size, rand() % 200, program);
    }
    for (int r = 0; r < world_size; r++) expect_end(pids[r], 0);
    for (int r = 0; r < world_size; r++) {
        assert_string_equal(results[r].text, "");
        assert_true(results[r].ok);
    }
}

static void test_meet(void **state) {
    (void)state;
    static const int worlds[] = {2, 3, 5, 16};
    for (size_t i = 0; i < sizeof worlds / sizeof worlds[0]; i++) {
        new_point(RANKS);
        meet(worlds[i], exchange_little);
    }
    new_point(RANKS);
    meet(5, exchange_much);
}

// Over each version of IP, by a name, and through any interface.
static void test_addresses(void **state) {
    (void)state;
    static const char *const addresses[] = {"::1", "localhost", "127.0.0.2"};
    char host[64] = "";
    gethostname(host, sizeof host - 1);
    for (size_t i = 0; i < 4; i++) {
        new_point(RANKS);
        snprintf(point.address, sizeof point.address, "%s", i < 3 ? addresses[i] : host);
        struct addrinfo *found = NULL;
        if (getaddrinfo(point.address, NULL, NULL, &found) != 0) continue; // a machine without it
        const int fd = socket(found->ai_family, SOCK_STREAM, 0);
        const bool usable = fd >= 0 && bind(fd, found->ai_addr, found->ai_addrlen) == 0;
        freeaddrinfo(found);
        if (fd >= 0) close(fd);
        if (usable) meet(3, exchange_little);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Whoever does not belong

static int connect_to(int port) {
    struct sockaddr_in address;
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    address.sin_port = htons((uint16_t)port);
    inet_pton(AF_INET, point.address, &address.sin_addr);
    for (const double begin = tcp_now(); tcp_now() - begin < 10; usleep(10000)) {
        const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (connect(fd, (struct sockaddr *)&address, sizeof address) == 0) return fd;
        close(fd);
    }
    fail_msg("nobody listens on port %d", port);
    return -1;
}

static RendezvousHello hello_of(uint32_t rank, uint32_t world_size) {
    RendezvousHello hello;
    memset(&hello, 0, sizeof hello);
    memcpy(hello.magic, RENDEZVOUS_MAGIC, sizeof hello.magic);
    hello.version = RENDEZVOUS_VERSION;
    hello.rank = rank;
    hello.world_size = world_size;
    hello.token = TOKEN;
    snprintf(hello.host, sizeof hello.host, "else\nwhere");
    return hello;
}

// Says this as a hello; the answer has to be a refusal with these words.
static void expect_refusal(const RendezvousHello *hello, size_t bytes, const char *words) {
    RendezvousHeader header;
    Error text;
    const int fd = connect_to(point.port);
    assert_int_equal(send(fd, hello, bytes, MSG_NOSIGNAL), bytes);
    if (bytes < sizeof *hello) shutdown(fd, SHUT_WR);
    assert_int_equal(tcp_receive(fd, &header, sizeof header, tcp_now() + 15), 0);
    assert_int_equal(header.kind, RENDEZVOUS_REFUSED);
    rendezvous_text(fd, &header, tcp_now() + 5, &text);
    if (strstr(text.text, words) == NULL) fail_msg("\"%s\" is not in: %s", words, text.text);
    char more;
    assert_true(recv(fd, &more, 1, 0) <= 0);
    close(fd);
}

static void test_refused(void **state) {
    (void)state;
    new_point(RANKS);
    const pid_t first = start_rank(0, 3, 0, exchange_little), second = start_rank(1, 3, 0, exchange_little);
    RendezvousHello hello = hello_of(2, 3);
    hello.version = 9;
    expect_refusal(&hello, sizeof hello, "version 9 of the protocol, rank 0's by version 1");
    expect_refusal(&hello, 20, "version 9"); // whose hello is another
    hello = hello_of(2, 3);
    hello.token++;
    expect_refusal(&hello, sizeof hello, "another job");
    hello = hello_of(2, 4);
    expect_refusal(&hello, sizeof hello, "one of 4 ranks, rank 0 one of 3");
    hello = hello_of(0, 3);
    expect_refusal(&hello, sizeof hello, "two processes were started as rank 0, on host0 and on else?where");
    hello = hello_of(3, 3);
    expect_refusal(&hello, sizeof hello, "no rank 3 of 3");
    hello = hello_of(0xffffffff, 3);
    expect_refusal(&hello, sizeof hello, "no rank 4294967295 of 3");
    // Rank 1 may come before its double, or after, and then finds the place free again.
    RendezvousHeader header = rendezvous_header(RENDEZVOUS_WELCOME, 0);
    for (int i = 0; i < 1000 && header.kind == RENDEZVOUS_WELCOME; i++) {
        usleep(10000);
        Error text;
        hello = hello_of(1, 3);
        memset(hello.host, 0xff, sizeof hello.host); // not even a text
        const int fd = connect_to(point.port);
        assert_int_equal(send(fd, &hello, sizeof hello, MSG_NOSIGNAL), sizeof hello);
        assert_int_equal(tcp_receive(fd, &header, sizeof header, tcp_now() + 5), 0);
        rendezvous_text(fd, &header, tcp_now() + 5, &text);
        if (header.kind == RENDEZVOUS_REFUSED)
            assert_string_equal(text.text, "two processes were started as rank 1, on host1 and on "
                                           "???????????????????????????????????????????????????????????????");
        close(fd);
    }
    assert_int_equal(header.kind, RENDEZVOUS_REFUSED);
    const pid_t third = start_rank(2, 3, 0, exchange_little);
    expect_end(third, 0);
    expect_end(first, 0);
    expect_end(second, 0);
    for (int r = 0; r < 3; r++) assert_string_equal(results[r].text, "");
}

// The refused rank's own words.
static void test_refused_rank(void **state) {
    (void)state;
    new_point(RANKS);
    timeout = 2;
    const pid_t first = start_rank(0, 3, 0, NULL);
    point.token = 5;
    expect_end(start_rank(1, 3, 0, NULL), 0);
    point.token = TOKEN;
    expect_end(start_rank(2, 7, 0, NULL), 0);
    char where[128];
    snprintf(where, sizeof where, "rank 0 at %.20s:%d refuses this rank: it is of another job", point.address,
             point.port);
    expect_text(1, where);
    expect_text(2, "it is one of 7 ranks, rank 0 one of 3");
    assert_true(results[1].seconds < timeout); // at once
    assert_false(results[1].ok || results[1].told || results[2].ok);
    expect_end(first, 0);
    expect_text(0, "ranks 1-2 of 3 did not come to 127.");
    expect_text(0, "refused was a rank 2 on host2: it is one of 7 ranks");
}

// Port scanners, browsers, and those who connect and say nothing, or half a hello: more of them than rank 0 listens to.
static void test_strangers(void **state) {
    (void)state;
    enum { SILENT = 2 * RENDEZVOUS_GUESTS }; // most of them just stay
    int silent[SILENT];
    new_point(RANKS);
    const pid_t first = start_rank(0, 4, 0, exchange_little);
    static const char *const words[] = {"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "", "traing", "traingpt\1\0\0\0", "\n"};
    RendezvousHello half = hello_of(1, 4);
    for (int i = 0; i < SILENT; i++) {
        silent[i] = connect_to(point.port);
        const int kind = i < 100 ? i % 5 : 1;
        send(silent[i], words[kind], strlen(words[kind]), MSG_NOSIGNAL);
        if (kind == 3) send(silent[i], &half, sizeof half - 1, MSG_NOSIGNAL);
        if (i % 11 == 0) { // resets
            const struct linger at_once = {1, 0};
            setsockopt(silent[i], SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
            close(silent[i]);
            silent[i] = -1;
        }
    }
    pid_t others[4];
    for (int r = 1; r < 4; r++) others[r] = start_rank(r, 4, 0, exchange_little);
    for (int r = 1; r < 4; r++) expect_end(others[r], 0);
    expect_end(first, 0);
    for (int r = 0; r < 4; r++) assert_string_equal(results[r].text, "");
    // Had rank 0 waited for even one of them, it would have been for RENDEZVOUS_ANSWER_SECONDS.
    assert_true(results[2].seconds < RENDEZVOUS_ANSWER_SECONDS - 1);
    for (int i = 0; i < SILENT; i++)
        if (silent[i] >= 0) close(silent[i]);
}

// ---------------------------------------------------------------------------------------------------------------------
// Whoever does not come

static int leave(Rendezvous *ranks, Result *result) {
    (void)ranks;
    (void)result;
    return 0;
}

static void test_missing(void **state) {
    (void)state;
    new_point(RANKS);
    timeout = 1.5;
    pid_t pids[8];
    static const int present[] = {0, 2, 6, 7};
    for (int i = 0; i < 4; i++) pids[i] = start_rank(present[i], 8, 0, leave);
    // Rank 1 comes, and leaves before all are there.
    RendezvousHello hello = hello_of(1, 8);
    RendezvousHeader header;
    const int fd = connect_to(point.port);
    assert_int_equal(send(fd, &hello, sizeof hello, MSG_NOSIGNAL), sizeof hello);
    assert_int_equal(tcp_receive(fd, &header, sizeof header, tcp_now() + 5), 0);
    assert_int_equal(header.kind, RENDEZVOUS_WELCOME);
    close(fd);
    for (int i = 0; i < 4; i++) expect_end(pids[i], 0);
    for (int i = 0; i < 4; i++) {
        const Result *result = &results[present[i]];
        expect_text(present[i], "ranks 1, 3-5 of 8 did not come to 127.");
        expect_text(present[i], "within 2 s; rank 1 on else?where had come, but left");
        assert_false(result->ok);
        assert_int_equal(result->told, present[i] != 0); // rank 0 says it
    }
    assert_true(results[0].seconds >= timeout);
}

// Rank 0 never comes, or its name is nobody's, or something else answers.
static void test_no_rank_0(void **state) {
    (void)state;
    pid_t pids[5] = {0};
    new_point(RANKS);
    timeout = 1.5;
    pids[1] = start_rank(1, 5, 0, NULL);
    new_point(RANKS);
    const MeetingPoint taken = point;
    timeout = 1.5;
    snprintf(point.address, sizeof point.address, "no-such-host.invalid");
    pids[2] = start_rank(2, 5, 0, NULL);
    point = taken;
    struct sockaddr_in address;
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    address.sin_port = htons((uint16_t)point.port);
    inet_pton(AF_INET, point.address, &address.sin_addr);
    const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(listener, (struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(listen(listener, 8), 0);
    pids[3] = start_rank(3, 5, 0, NULL);
    pids[4] = start_rank(0, 5, 0, NULL);
    for (int i = 0; i < 3; i++) {
        struct pollfd ready = {listener, POLLIN, 0};
        if (i == 2) pids[0] = start_rank(4, 5, 0, NULL); // as rank 3 has been refused
        assert_int_equal(poll(&ready, 1, 10000), 1);
        const int fd = accept(listener, NULL, NULL);
        // What is no answer at all; a refusal that goes on and on; a refusal that claims to.
        char refusal[sizeof(RendezvousHeader) + 5000];
        const RendezvousHeader header = rendezvous_header(RENDEZVOUS_REFUSED, (size_t)1 << 62);
        memset(refusal, 'x', sizeof refusal);
        if (i > 0) memcpy(refusal, &header, sizeof header);
        send(fd, refusal, i == 2 ? sizeof header : sizeof refusal, MSG_NOSIGNAL);
        for (char c; recv(fd, &c, 1, 0) == 1;) continue;
        close(fd);
    }
    expect_end(pids[1], 0);
    expect_text(1, "rank 0 cannot be reached at 127.");
    expect_text(1, "(the test), tried for 1 s: Connection refused");
    expect_end(pids[2], 0);
    expect_text(2, "rank 0 cannot be reached at no-such-host.invalid:");
    expect_end(pids[3], 0);
    expect_text(3, "refuses this rank: xxxxxxxxxx");
    expect_end(pids[0], 0);
    expect_text(4, "refuses this rank: it did not say why");
    expect_end(pids[4], 0);
    char in_use[64];
    snprintf(in_use, sizeof in_use, "port %d, where the ranks are to meet, is in use", point.port);
    expect_text(0, in_use);
    for (int r = 0; r < 5; r++) assert_false(results[r].ok);
    close(listener);
}

// ---------------------------------------------------------------------------------------------------------------------
// Whoever fails when all have met

static int fail_in_exchange(Rendezvous *ranks, Result *result) {
    if (ranks->rank == 2) _exit(0); // without a word
    return exchange(ranks, 100, result);
}

static int another_size(Rendezvous *ranks, Result *result) {
    return exchange(ranks, ranks->rank == 2 ? 1000000 : 100, result);
}

static int silent_in_exchange(Rendezvous *ranks, Result *result) {
    if (ranks->rank != 2) return exchange(ranks, 100, result);
    usleep(4000000);
    return 0;
}

static void test_failing_exchange(void **state) {
    (void)state;
    static const struct {
        RankProgram program;
        const char *words;
        int codes[3];
    } cases[] = {
        {fail_in_exchange, "rank 2 on host2 is lost: its connection was closed", {3, 5, 0}},
        {another_size, "rank 2 on host2 sent something else than was expected", {3, 5, -1}},
        {silent_in_exchange, "rank 2 on host2 is lost: nothing was heard of it in time", {3, 5, 0}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        new_point(RANKS);
        timeout = cases[i].program == silent_in_exchange ? 2 : 20;
        pid_t pids[3];
        for (int r = 0; r < 3; r++) pids[r] = start_rank(r, 3, 0, cases[i].program);
        for (int r = 0; r < 2; r++) {
            expect_end(pids[r], cases[i].codes[r]);
            expect_text(r, cases[i].words);
        }
        int status;
        assert_int_equal(waitpid(pids[2], &status, 0), pids[2]);
        if (cases[i].codes[2] >= 0) assert_int_equal(status, 0);
        if (cases[i].codes[2] < 0) assert_int_not_equal(status, 0);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The control line

enum { LINES = 5, LINE_RANKS = 3 };

// A rank under the control line: says that it has begun, and trains until it is to end.
static int train(Rendezvous *ranks, Result *result) {
    ControlLine line;
    const int code = exchange(ranks, 8, result);
    if (code != 0) return code;
    control_start(&line, ranks);
    result->seconds = -1;
    for (int i = 0; i < 600 && result->seconds < 0; i++) usleep(50000);
    for (int i = 0; i < ranks->rank * ranks->rank * 14; i++) usleep(100000); // the last, long after the others
    control_stop(&line);
    return 40 + ranks->rank;
}

// Of ranks that end in order, of one that is killed, of one that is stopped, of rank 0 killed, and of one that ends
// shortly before the others, who know about it.
static void test_control_line(void **state) {
    (void)state;
    static const struct {
        int victim, number;
        double timeout;
        const char *said;
        int speakers[LINE_RANKS];
    } lines[LINES] = {
        {-1, 0, 20, "", {0, 0, 0}},
        {1, SIGKILL, 20, "rank 1 on host1 is lost: its connection was closed", {1, 0, 0}},
        {2, SIGSTOP, 2, "rank 2 on host2 is lost: nothing was heard of it in time", {1, 0, 0}},
        {0, SIGKILL, 20, "rank 0 on host0 is lost: its connection was closed", {0, 1, 1}},
        {1, SIGKILL, 20, "", {0, 0, 0}},
    };
    pid_t pids[LINES][LINE_RANKS];
    int outputs[LINES];
    Result *all = results;
    for (int i = 0; i < LINES; i++) { // at the same time, as a loss takes some seconds
        results = all + i * LINE_RANKS;
        new_point(LINE_RANKS);
        timeout = lines[i].timeout;
        FILE *file = tmpfile();
        assert_non_null(file);
        outputs[i] = dup(fileno(file));
        fclose(file);
        const int own = dup(STDERR_FILENO);
        dup2(outputs[i], STDERR_FILENO);
        for (int r = 0; r < LINE_RANKS; r++) pids[i][r] = start_rank(r, LINE_RANKS, 0, train);
        dup2(own, STDERR_FILENO);
        close(own);
        for (int r = 0; r < LINE_RANKS; r++)
            for (int n = 0; n < 1000 && results[r].seconds != -1; n++) usleep(10000);
        results = all;
    }
    const double begin = tcp_now();
    for (int i = 0; i < LINES; i++)
        if (lines[i].victim >= 0) kill(pids[i][lines[i].victim], lines[i].number);
    usleep(1500000); // a loss is known
    for (int i = 0; i < LINES; i++)
        for (int r = 0; r < LINE_RANKS && lines[i].said[0] == '\0'; r++) all[i * LINE_RANKS + r].seconds = 1;
    for (int i = 0; i < LINES; i++) {
        int codes[LINE_RANKS];
        for (int r = 0; r < LINE_RANKS; r++) {
            if (r == lines[i].victim) continue;
            assert_int_equal(waitpid(pids[i][r], &codes[r], 0), pids[i][r]);
        }
        // On a busy machine a second may take some.
        assert_true(tcp_now() - begin < lines[i].timeout + CONTROL_LAST_SECONDS + 10);
        if (lines[i].victim >= 0) {
            kill(pids[i][lines[i].victim], SIGKILL);
            expect_end(pids[i][lines[i].victim], -SIGKILL);
        }
        char text[4096];
        const ssize_t length = pread(outputs[i], text, sizeof text - 1, 0);
        assert_true(length >= 0);
        text[length] = '\0';
        close(outputs[i]);
        for (int r = 0; r < LINE_RANKS; r++) {
            const int code = lines[i].said[0] == '\0' ? 40 + r : EXIT_RUN;
            if (r != lines[i].victim && codes[r] != code << 8)
                fail_msg("line %d, rank %d: wait status %x\n%s", i, r, (unsigned)codes[r], text);
        }
        int said = 0;
        for (int r = 0; r < LINE_RANKS; r++) {
            char line[256];
            snprintf(line, sizeof line, "train_gpt: rank %d of 3 on host%d failed: %s", r, r, lines[i].said);
            const bool speaks = lines[i].said[0] != '\0' && strstr(text, line) != NULL;
            if (speaks != lines[i].speakers[r]) fail_msg("line %d, rank %d: %s", i, r, text);
            said += speaks;
        }
        int count = 0;
        for (const char *c = text; *c != '\0'; c++) count += *c == '\n';
        if (count != said) fail_msg("line %d: %s", i, text);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Meeting points

static void test_nodelist(void **state) {
    (void)state;
    static const struct {
        const char *list, *first; // NULL: it is no list
    } lists[] = {
        {"node1", "node1"},
        {"node[01-03,7],gpu5", "node01"},
        {"node[7,01-03]", "node7"},
        {"gpu5,node[01-03,7]", "gpu5"},
        {"n[1-2]", "n1"},
        {"n[005]", "n005"},
        {"rack[1-2]node[01-04]", "rack1node01"},
        {"rack[10,12]-n[08-11].cluster.example", "rack10-n08.cluster.example"},
        {"a-b_c.d", "a-b_c.d"},
        {"[1-3]x", "1x"},
        {"", NULL},
        {",a", NULL},
        {"n[", NULL},
        {"n[]", NULL},
        {"n[1-2", NULL},
        {"n1]", NULL},
        {"n[[1]]", NULL},
        {"n[a-b]", NULL},
        {"n[-1]", NULL},
        {"n 1", NULL},
        {"n;reboot", NULL},
        {"(null)", NULL},
    };
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++) {
        char host[64];
        memset(host, 'x', sizeof host);
        const bool ok = nodelist_first(lists[i].list, host, sizeof host);
        if (ok != (lists[i].first != NULL) || (ok && strcmp(host, lists[i].first) != 0))
            fail_msg("%s: %d, %.64s", lists[i].list, ok, host);
    }
    char tight[6];
    assert_true(nodelist_first("n[123-456]x", tight, sizeof tight));
    assert_string_equal(tight, "n123x");
    assert_false(nodelist_first("n[1234-5678]x", tight, sizeof tight));
}

static const char *const variables[] = {"MASTER_ADDR",
                                        "MASTER_PORT",
                                        "TRAIN_GPT_JOB",
                                        "SLURM_JOB_ID",
                                        "SLURM_STEP_ID",
                                        "SLURM_RESTART_COUNT",
                                        "SLURM_PROCID",
                                        "SLURM_STEP_NODELIST",
                                        "SLURM_JOB_NODELIST",
                                        "TORCHELASTIC_RUN_ID",
                                        "TORCHELASTIC_RESTART_COUNT",
                                        "TORCHELASTIC_USE_AGENT_STORE"};

// The point where a rank of an environment of these settings meets the others.
static bool point_of(const char *settings, int start, int local_size, MeetingPoint *found, Error *error) {
    const Place place = {1, 4, 0, local_size, true, &place_starts()[start]};
    for (size_t i = 0; i < sizeof variables / sizeof variables[0]; i++) unsetenv(variables[i]);
    char copy[512], *rest = NULL;
    snprintf(copy, sizeof copy, "%s", settings);
    for (char *setting = strtok_r(copy, " ", &rest); setting != NULL; setting = strtok_r(NULL, " ", &rest)) {
        char *value = strchr(setting, '=');
        *value++ = '\0';
        setenv(setting, value, 1);
    }
    memset(error, 0, sizeof *error);
    const bool ok = meeting_point(&place, found, error);
    for (size_t i = 0; i < sizeof variables / sizeof variables[0]; i++) unsetenv(variables[i]);
    return ok;
}

enum { TORCHRUN = 1, SRUN = 5, BARE = 7 }; // in place_starts()

static void test_meeting_point(void **state) {
    (void)state;
    assert_string_equal(place_starts()[TORCHRUN].name, "torchrun");
    assert_string_equal(place_starts()[SRUN].name, "srun without --mpi");
    assert_string_equal(place_starts()[BARE].name, "RANK and WORLD_SIZE");
    static const struct {
        const char *settings;
        int start, local_size;
        const char *address;
        int port; // 0: one that follows from the job
    } points[] = {
        {"MASTER_ADDR=node1 MASTER_PORT=1234", BARE, 2, "node1", 1234},
        {"MASTER_ADDR=node1 MASTER_PORT=1234 SLURM_STEP_NODELIST=n[1-2]", SRUN, 2, "node1", 1234},
        {"MASTER_ADDR=fd00::2", BARE, 2, "fd00::2", 0},
        {"MASTER_PORT=65535", BARE, 4, "127.0.0.1", 65535},
        {"MASTER_ADDR= SLURM_STEP_NODELIST=n[1-2] SLURM_JOB_NODELIST=m[1-2]", SRUN, 2, "n1", 0},
        {"SLURM_JOB_NODELIST=m[1-2] SLURM_JOB_ID=5", SRUN, 2, "m1", 0},
        {"SLURM_JOB_NODELIST=m[1-2] SLURM_JOB_ID=5", BARE, 2, "m1", 0},
        {"MASTER_ADDR=n MASTER_PORT=29500 TORCHELASTIC_RUN_ID=none", TORCHRUN, 2, "n", 29500},
        {"MASTER_ADDR=n MASTER_PORT=1234 TORCHELASTIC_RUN_ID=none TORCHELASTIC_USE_AGENT_STORE=True", TORCHRUN, 2, "n",
         0},
    };
    Error error;
    MeetingPoint found, other;
    for (size_t i = 0; i < sizeof points / sizeof points[0]; i++) {
        assert_true(point_of(points[i].settings, points[i].start, points[i].local_size, &found, &error));
        assert_string_equal(found.address, points[i].address);
        if (points[i].port != 0) assert_int_equal(found.port, points[i].port);
        if (points[i].port == 0)
            assert_in_range(found.port, MEETING_FIRST_PORT, MEETING_FIRST_PORT + MEETING_PORTS - 1);
    }
    static const struct {
        const char *settings, *words;
    } nonsense[] = {
        {"MASTER_PORT=1234", "MASTER_ADDR is not set"},
        {"MASTER_ADDR=a MASTER_PORT=0", "MASTER_PORT is \"0\""},
        {"MASTER_ADDR=a MASTER_PORT=65536", "MASTER_PORT is \"65536\""},
        {"MASTER_ADDR=a MASTER_PORT=http", "MASTER_PORT is \"http\""},
        {"SLURM_STEP_NODELIST=n[1-2", "SLURM_STEP_NODELIST is \"n[1-2\""},
    };
    for (size_t i = 0; i < sizeof nonsense / sizeof nonsense[0]; i++) {
        assert_false(point_of(nonsense[i].settings, BARE, 2, &found, &error));
        if (strstr(error.text, nonsense[i].words) == NULL) fail_msg("%s: %s", nonsense[i].settings, error.text);
    }
    // What tells jobs apart, and what does not.
    static const struct {
        const char *one, *another;
        int start;
        bool same;
    } jobs[] = {
        {"SLURM_JOB_ID=1", "SLURM_JOB_ID=2", SRUN, false},
        {"SLURM_JOB_ID=1 SLURM_STEP_ID=0", "SLURM_JOB_ID=1 SLURM_STEP_ID=1", SRUN, false},
        {"SLURM_JOB_ID=1 SLURM_STEP_ID=0", "SLURM_JOB_ID=1 SLURM_STEP_ID=1", BARE, true},
        {"SLURM_JOB_ID=1 SLURM_RESTART_COUNT=1", "SLURM_JOB_ID=1 SLURM_RESTART_COUNT=2", BARE, false},
        {"TRAIN_GPT_JOB=a SLURM_JOB_ID=1", "TRAIN_GPT_JOB=a SLURM_JOB_ID=2", SRUN, true},
        {"TRAIN_GPT_JOB=a", "TRAIN_GPT_JOB=b", BARE, false},
        {"TORCHELASTIC_RUN_ID=a TORCHELASTIC_RESTART_COUNT=0", "TORCHELASTIC_RUN_ID=a TORCHELASTIC_RESTART_COUNT=1",
         TORCHRUN, false},
        {"MASTER_PORT=1", "MASTER_PORT=2", BARE, true},
    };
    for (size_t i = 0; i < sizeof jobs / sizeof jobs[0]; i++) {
        assert_true(point_of(jobs[i].one, jobs[i].start, 4, &found, &error));
        assert_true(point_of(jobs[i].another, jobs[i].start, 4, &other, &error));
        assert_int_equal(found.token == other.token, jobs[i].same);
    }
}

static int set_up(void **state) {
    (void)state;
    signal(SIGPIPE, SIG_IGN);
    results = (Result *)mmap(NULL, RANKS * sizeof *results, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return results == MAP_FAILED ? -1 : 0;
}

// Runs tests in a process of their own, which writes to a file.
#define START(group, pid, output)                           \
    do {                                                    \
        output = tmpfile();                                 \
        pid = output == NULL ? -1 : fork();                 \
        if (pid != 0) break;                                \
        prctl(PR_SET_PDEATHSIG, SIGKILL);                   \
        dup2(fileno(output), STDOUT_FILENO);                \
        dup2(fileno(output), STDERR_FILENO);                \
        return cmocka_run_group_tests(group, set_up, NULL); \
    } while (0)

// Three groups at the same time, as each mostly waits.
int main(void) {
    const struct CMUnitTest meetings[] = {
        cmocka_unit_test(test_nodelist),  cmocka_unit_test(test_meeting_point), cmocka_unit_test(test_meet),
        cmocka_unit_test(test_addresses), cmocka_unit_test(test_refused),       cmocka_unit_test(test_strangers),
    };
    const struct CMUnitTest failures[] = {
        cmocka_unit_test(test_refused_rank),
        cmocka_unit_test(test_missing),
        cmocka_unit_test(test_no_rank_0),
        cmocka_unit_test(test_failing_exchange),
    };
    const struct CMUnitTest lines[] = {cmocka_unit_test(test_control_line)};
    FILE *outputs[3];
    pid_t pids[3];
    START(meetings, pids[0], outputs[0]);
    START(failures, pids[1], outputs[1]);
    START(lines, pids[2], outputs[2]);
    int failed = 0;
    for (int i = 0; i < 3; i++) {
        int status = 0;
        failed |= pids[i] < 0 || waitpid(pids[i], &status, 0) != pids[i] || status != 0;
        if (outputs[i] != NULL) rewind(outputs[i]);
        for (int c; outputs[i] != NULL && (c = fgetc(outputs[i])) != EOF;) putchar(c);
    }
    return failed;
}
